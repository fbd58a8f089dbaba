"""Paced workers' engine: tokens follow from what stands in the pool, and steps take the time of a profile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.paced.profile import PACED_LAYERS, PacedProfile, load_paced_profile
from configs.profiles import DecodeTime, PrefillTime
from engine.batch import Chunk
from engine.paced.engine import PacedEngine
from engine.paced.fingerprints import next_token
from engine.paced.runner import PacedRunner
from engine.scoring import PromptScores
from protocol.sampling import SamplingParams, TokenBias
from tests.tiny_models import TINY

BLOCK = 8


def profile_of(prefill: Sequence[PrefillTime], decode: Sequence[DecodeTime]) -> PacedProfile:
    whole = load_paced_profile("h200-8b").model_dump()
    return PacedProfile.model_validate(whole | {"prefill": prefill, "decode": decode})


GREEDY = SamplingParams(seed=0, max_tokens=100, temperature=0)
Tokens = st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=70)


def runner() -> PacedRunner:
    return PacedRunner(TINY, block_size=BLOCK, num_kv_tokens=400)


def chunk(tokens: Sequence[int], start: int, table: Sequence[int], sampling: SamplingParams | None = GREEDY) -> Chunk:
    return Chunk(token_ids=tokens[start:], start=start, block_table=table, sampling=sampling, num_generated=0, history=tokens)


def answer(engine: PacedRunner, tokens: list[int], cuts: Sequence[int], table: Sequence[int], count: int) -> list[int]:
    """So many tokens behind a prompt that is computed in parts."""
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        (token,) = engine.execute([chunk(tokens[:end], start, table, GREEDY if end == len(tokens) else None)])
    said = []
    for _ in range(count):
        assert token is not None
        said.append(token.token_id)
        tokens = [*tokens, token.token_id]
        (token,) = engine.execute([chunk(tokens, len(tokens) - 1, table)])
    return said


@given(Tokens, st.data())
def test_an_answer_follows_from_its_tokens_alone(tokens: list[int], data: st.DataObject) -> None:
    """Wherever its blocks lie, and however the prompt was cut."""
    table = data.draw(st.permutations(range(50)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=3)) - {len(tokens)})
    expected, whole = [], list(tokens)
    for _ in range(10):
        whole.append(next_token(whole, TINY, BLOCK))
        expected.append(whole[-1])
    assert answer(runner(), tokens, cuts, table, 10) == expected
    assert set(expected).isdisjoint(TINY.eos_token_ids)


def swapped(pool: torch.Tensor, table: list[int]) -> list[int]:
    return [table[1], table[0], *table[2:]]


def lost(pool: torch.Tensor, table: list[int]) -> list[int]:
    pool[:, :, table[1]] = 0
    return table


def one_layer_of_another(pool: torch.Tensor, table: list[int]) -> list[int]:
    pool[PACED_LAYERS - 1, 1, table[0]] = pool[PACED_LAYERS - 1, 1, table[1]]
    return table


def layers_swapped(pool: torch.Tensor, table: list[int]) -> list[int]:
    pool[:, :, table[0]] = pool[:, :, table[0]].flip(0)
    return table


def of_another_prefix(pool: torch.Tensor, table: list[int]) -> list[int]:
    """The same tokens at the same place, behind another first token."""
    return [table[0], 40, *table[2:]]


Damage = Callable[[torch.Tensor, list[int]], list[int]]


@pytest.mark.parametrize("damage", [swapped, lost, one_layer_of_another, layers_swapped, of_another_prefix])
def test_a_wrong_block_gives_another_token(damage: Damage) -> None:
    engine, tokens, table = runner(), list(range(1, 33)), [7, 3, 9, 11]
    engine.execute([chunk([200, *tokens[1:16]], 0, [41, 40])])
    (right,) = engine.execute([chunk(tokens, 0, table)])
    (again,) = engine.execute([chunk(tokens, len(tokens) - 1, table)])
    assert right == again
    assert right is not None
    assert right.token_id == next_token(tokens, TINY, BLOCK)
    (other,) = engine.execute([chunk(tokens, len(tokens) - 1, damage(engine.pool.data, list(table)))])
    assert other != right


def test_a_part_of_a_block_is_missed_within_a_block() -> None:
    engine, tokens, table = runner(), list(range(1, 33)), [7, 3, 9, 11, 20]
    engine.execute([chunk(tokens, 0, table)])
    engine.pool.data[0, 0, table[1], 3] ^= 1
    wrong = 0
    for _ in range(BLOCK):
        (token,) = engine.execute([chunk(tokens, len(tokens) - 1, table)])
        tokens.append(next_token(tokens, TINY, BLOCK))
        wrong += token is None or token.token_id != tokens[-1]
    assert wrong == 1


def test_a_step_takes_the_time_of_its_profile() -> None:
    profile = profile_of(
        [PrefillTime(tokens=1, start=0, seconds=0.001), PrefillTime(tokens=100, start=0, seconds=0.1)],
        [DecodeTime(batch=1, context=100, seconds=0.1), DecodeTime(batch=1, context=200, seconds=0.2)],
    )
    prompt, stream = chunk([1] * 50, 0, range(10), None), chunk([1] * 100, 99, range(10, 30))

    async def steps() -> None:
        engine = PacedEngine(runner(), profile)
        try:
            for chunks, step_s in (([prompt], 0.05), ([stream], 0.1), ([prompt, stream], 0.149)):
                began = time.monotonic()
                nothing, *token = await engine.start(chunks)
                assert 0 <= time.monotonic() - began - step_s < 0.1
                assert engine.step_age_s == 0
            assert nothing is None
            assert len(token) == 1
            assert engine.steps == 3
            assert engine.busy_s >= 0.299
        finally:
            engine.close()

    asyncio.run(steps())


def test_an_engine_can_be_closed_while_it_computes() -> None:
    profile = profile_of([PrefillTime(tokens=1, start=0, seconds=60.0)], [])

    async def closed() -> None:
        engine = PacedEngine(runner(), profile)
        step = engine.start([chunk([1, 2], 0, range(1), None)])
        await asyncio.sleep(0.01)
        assert engine.step_age_s > 0
        engine.close()
        await asyncio.wait([step])
        assert step.cancelled()

    asyncio.run(closed())


def test_who_has_a_word_in_it_gets_the_real_sampler() -> None:
    """Biases and logprobs: the fingerprints' token is by far the likeliest, and a forbidden one is not said."""
    tokens, table = list(range(1, 20)), range(5)
    said = next_token(tokens, TINY, BLOCK)
    with_logprobs = replace(GREEDY, num_logprobs=2, temperature=1.0)
    (token,) = runner().execute([chunk(tokens, 0, table, with_logprobs)])
    assert token is not None
    assert token.logprobs is not None
    assert (token.token_id, token.logprobs.top[0].token_id) == (said, said)
    assert token.logprobs.chosen == pytest.approx(0, abs=1e-3)
    forbidden = replace(GREEDY, stop_token_ids=(said,), min_tokens=5)
    (token,) = runner().execute([chunk(tokens, 0, table, forbidden)])
    assert token is not None
    assert token.token_id != said
    wanted = replace(GREEDY, logit_bias=(TokenBias(7, 100.0),))
    (token,) = runner().execute([chunk(tokens, 0, table, wanted)])
    assert token is not None
    assert token.token_id == said


def test_a_prompt_gets_its_logprobs() -> None:
    tokens = [3]
    while len(tokens) < 150:
        tokens.append(next_token(tokens, TINY, BLOCK) if len(tokens) % 3 else 5)
    scores = PromptScores(tokens, 1)
    first = replace(chunk(tokens[:100], 0, range(20), None), scores=scores)
    second = replace(chunk(tokens, 100, range(20)), scores=scores)
    engine = runner()
    engine.execute([first])
    engine.execute([second])
    packed = torch.frombuffer(bytearray(scores.packed().chosen), dtype=torch.float32)
    said = torch.tensor([next_token(tokens[:end], TINY, BLOCK) == tokens[end] for end in range(1, 150)])
    assert torch.equal(packed > -1, said)
    assert 90 < int(said.sum()) < 149
