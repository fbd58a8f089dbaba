"""A draft model drafts what it would say alone, for several sequences together and however its KV came about."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, PoolConfig
from configs.speculation.config import SpeculativeConfig
from engine.drafting.draft_model import PROBES, DraftModel, DraftRequest
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams, TokenBias
from tests.tiny_models import random_model, saved, tiny_facts

CONFIG = ClusterConfig(
    dtype="float32",
    block_size=8,
    speculative_config=SpeculativeConfig(method="draft_model", model="tiny", num_speculative_tokens=4),
)
POOL = PoolConfig(kv_cache_tokens=4096)
WAYS = [SamplingParams(1, 9, temperature=0.0), SamplingParams(2, 9), SamplingParams(3, 9, temperature=0.7, top_k=20)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    facts = tiny_facts("tiny")
    return saved(random_model(facts, seed=3), facts, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(facts: ModelFacts) -> DraftModel:
    return DraftModel.load(CONFIG, POOL, facts, facts.vocab_size, "cpu")


def alone(model: DraftModel, tokens: list[int], count: int, sampling: SamplingParams) -> list[int]:
    """One draft after the other, each of them with all the tokens computed anew."""
    said: list[int] = []
    for _ in range(count):
        request = DraftRequest([*tokens, *said], 0, range(100, 120), 1, sampling, 1 + len(said))
        said += model.draft([request]).token_ids[0]
    return said


def test_drafts_are_what_the_model_says(model: DraftModel) -> None:
    """Some sequences are new, some are taken in by parts, some have drafts behind them that were wrong."""
    rng = random.Random(1)
    sequences = [[rng.randrange(1, 211) for _ in range(rng.randint(2, 60))] for _ in range(6)]
    requests = []
    for number, tokens in enumerate(sequences):
        table, sampling, start = range(10 * number, 10 * number + 10), WAYS[number % 3], 0
        if number % 2:
            start = len(tokens) - 1
            [nothing] = model.draft([DraftRequest(tokens[:start], 0, table, 0, sampling, 1)]).token_ids
            assert nothing == [], "more is to be taken in"
        if number > 3:
            model.draft([DraftRequest([*tokens[start:], 5, 6, 7], start, table, 2, sampling, 1)])  # what was said differs
        requests.append(DraftRequest(tokens[start:], start, table, number, sampling, 1))
    drafted = model.draft(requests)
    for number, (tokens, found) in enumerate(zip(sequences, drafted.token_ids, strict=True)):
        assert list(found) == alone(model, tokens, number, WAYS[number % 3])
    rows = [number for number, _ in drafted.steps]
    assert rows == [sum(len(each.token_ids) for each in requests), 4, 3, 2, 1]
    assert all(seconds > 0 for _, seconds in drafted.steps)


def test_a_probe_touches_no_other_block(model: DraftModel) -> None:
    tokens, table = [5, 6, 7, 8], range(3)
    before = model.draft([DraftRequest(tokens, 0, table, 3, WAYS[0], 1)]).token_ids
    assert [rows for rows, _ in model.probe(50).steps] == [1] * PROBES
    assert model.draft([DraftRequest(tokens[3:], 3, table, 3, WAYS[0], 1)]).token_ids == before


def test_its_pool_is_its_own_and_bounded(model: DraftModel) -> None:
    assert model.num_blocks * model.block_size == 1024
    assert model.max_model_len == 512


def test_what_can_not_be_loaded_is_told(facts: ModelFacts) -> None:
    with pytest.raises(ConfigError, match="draft_model is for processors"):
        DraftModel.load(CONFIG, POOL, facts, facts.vocab_size, "cuda")


def test_ids_that_one_of_the_two_models_lacks(model: DraftModel) -> None:
    """They stand for nothing: such a draft ends the drafts, and such a token of a prompt is another one to the draft model."""
    tokens, table = [5, 6, 7, 8], range(40, 43)
    [found] = model.draft([DraftRequest(tokens, 0, table, 4, WAYS[1], 1)]).token_ids
    highest = max(found)
    fewer = DraftModel(model._runner, 100, highest)
    assert list(fewer.draft([DraftRequest(tokens, 0, table, 4, WAYS[1], 1)]).token_ids[0]) == found[: found.index(highest)]
    last = model._runner.facts.vocab_size - 1
    beyond, within = (
        model.draft([DraftRequest([5, token, 7], 0, table, 4, WAYS[0], 1)]).token_ids for token in (last + 64, last)
    )
    assert beyond == within
    told = replace(WAYS[0], min_tokens=9, stop_token_ids=(last + 9,), logit_bias=(TokenBias(last + 64, 5.0),))
    plain, beyond = (model.draft([DraftRequest(tokens, 0, table, 4, way, 1)]).token_ids for way in (WAYS[0], told))
    assert beyond == plain
    known = replace(WAYS[0], min_tokens=9, stop_token_ids=(plain[0][0], last + 9), logit_bias=(TokenBias(3, 100.0),))
    assert list(model.draft([DraftRequest(tokens, 0, table, 4, known, 1)]).token_ids[0]) == [3, 3, 3, 3]
