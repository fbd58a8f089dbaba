"""A draft model changes nothing that is said: whatever it drafts, and whoever dies, moves or runs out of blocks.

Two draft models: the served one, whose drafts are right, and one of other random weights, whose drafts are wrong but for
chance. How many drafts pay is not asked here, but for the last tests: counts are made up, so that all kinds of steps happen.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation import model_speculator, speculator
from decode_workers.speculation.draft_kv import ModelDrafts
from decode_workers.speculation.draft_rounds import Candidate, Round
from decode_workers.speculation.model_speculator import RETRY, ModelSpeculator
from protocol.sampling import SamplingParams
from tests.cases import seeds
from tests.fault.many_decodes import CONFIG, COPYING, ManyDecodes, run_many_decodes
from tests.fault.scenarios import prompt_of, run
from tests.fault.test_speculation import EIGHT, GRAMMAR, Wanted, ask, cases, move_and_kill, report, said, unguessed
from tests.tiny_models import random_model, saved

DRAFTED = SpeculativeConfig(method="draft_model", model="small", num_speculative_tokens=5)
KINDS = ["right", "wrong"]


@pytest.fixture(scope="session")
def drafts(small_model: ModelFacts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    """Draft models by what their drafts are."""
    shape = replace(small_model, name="wrong", model_hash="wrong", num_layers=1)
    wrong = saved(random_model(shape, seed=8), shape, tmp_path_factory.mktemp("wrong-draft"))
    return {"right": small_model, "wrong": wrong}


def drafting(config: ClusterConfig, speculative: SpeculativeConfig = DRAFTED, **decode: Any) -> ClusterConfig:
    return config.model_copy(update={"speculative_config": speculative, "decode": config.decode.model_copy(update=decode)})


@pytest.fixture
def any_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs and has cost, in every step, and for as many tokens as chance has it."""
    rng = random.Random(1)

    def some(candidates: Sequence[Candidate], num_rows: int, most: int, *costs: Any) -> Round | None:
        counts = []
        for each in candidates:
            counts.append(min(each.most, most, rng.randint(0, 5)))
            most -= counts[-1]
        return Round(counts, 1.0) if any(counts) else None

    monkeypatch.setattr(model_speculator, "best_round", some)
    monkeypatch.setattr(model_speculator, "is_worth_making_up", lambda *costs: True)
    monkeypatch.setattr(model_speculator, "ALLOWED_STEPS", math.inf)
    monkeypatch.setattr(speculator.Speculator, "_plain_is_due", lambda self, num_rows: False)


def of(many: ManyDecodes, name: str = "decode-0") -> ModelSpeculator:
    found = many.decodes[name]._speculator
    assert isinstance(found, ModelSpeculator)
    return found


@pytest.mark.parametrize("seed", seeds(1, 4, thorough=8))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disaggregation", ["always", "never"])
def test_every_kind_of_sampling_says_the_same(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, seed: int, kind: str, disaggregation: str
) -> None:
    """Greedy and sampled, penalized, with logprobs, choices, least lengths and stop tokens; bit for bit, logprobs too."""
    config = drafting(CONFIG.model_copy(update={"disaggregation": disaggregation}), max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config, draft=drafts[kind]) as many:
            wanted = cases(seed)
            expected = await unguessed(many, wanted)
            assert report(many).draft_tokens == 0, "who does not want it gets none"
            assert many.draft_blocks() == 0, "and nothing of it is taken in"
            assert said(await ask(many, wanted)) == said(expected)
            found = report(many)
            assert found.draft_tokens > found.accepted_tokens > 0
            assert kind == "wrong" or found.accepted_tokens > found.draft_tokens / 5, "the draft model knows no penalties"

    run(scenario())


def test_unpenalized_drafts_of_the_same_model_are_all_right(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None
) -> None:
    """Greedy or not: the draft model has the noise of the stream. So its KV is what it should be in every step."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts["right"]) as many:
            wanted = [(each, SamplingParams(seed=n, max_tokens=80, temperature=n % 3 / 2)) for n, each in enumerate(EIGHT)]
            await ask(many, wanted)
            assert report(many).accepted_tokens == report(many).draft_tokens > 200

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_streams_that_run_out_of_blocks_say_the_same(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, seed: int, kind: str
) -> None:
    """Both pools are too small: of 96 tokens that of the draft model, so that not everybody is drafted for."""
    short = DRAFTED.model_copy(update={"max_model_len": 96})
    config, facts = drafting(CONFIG, short, kv_cache_tokens=256, max_batch_size=64), replace(drafts[kind], max_model_len=96)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, CONFIG) as roomy:
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in cases(seed)]
            expected = await unguessed(roomy, wanted)
        async with run_many_decodes(small_model, 1, config, draft=facts) as many:
            assert of(many).kv.num_blocks == 96 // config.block_size
            assert [each.token_ids for each in await ask(many, wanted)] == [each.token_ids for each in expected]
            assert report(many).num_preemptions > 0
            assert report(many).draft_tokens > 0

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_more_streams_than_rows_take_turns(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, seed: int
) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=4), draft=drafts["right"]) as many:
            wanted = cases(seed)
            expected = await unguessed(many, wanted)
            assert said(await ask(many, wanted)) == said(expected)

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_are_followed_along_the_drafts(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, kind: str
) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts[kind]) as many:
            sampling = SamplingParams(seed=1, max_tokens=120, temperature=1.0, grammar=GRAMMAR, stop_token_ids=(0,))
            wanted = [(prompt, replace(sampling, seed=n)) for n, prompt in enumerate(EIGHT[:4])]
            expected = await unguessed(many, wanted)
            assert said(await ask(many, wanted)) == said(expected)
            assert report(many).draft_tokens > 0

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2,), (4,)])
def test_the_first_rank_of_a_gang_drafts_for_all(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, ranks: tuple[int, ...]
) -> None:
    config = drafting(CONFIG, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config, ranks, draft=drafts["right"]) as many:
            wanted = cases(5, 60)
            expected = await unguessed(many, wanted)
            answers = await ask(many, wanted)
            assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
            assert report(many).accepted_tokens > 0

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_streams_that_move_and_workers_that_die(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, seed: int
) -> None:
    """Copies, a drain, and the death of another worker, all while tokens are drafted."""
    config = drafting(COPYING, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 3, config, draft=drafts["right"]) as many:
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in cases(seed, 250)]
            expected = await unguessed(many, wanted)
            await move_and_kill(many, wanted, expected)

    run(scenario())


def test_who_leaves_while_drafts_are_computed_gives_all_back(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled right when the draft model computes for them; the others go on."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts["right"]) as many:
            wanted: Wanted = [(each, SamplingParams(seed=1, max_tokens=60, temperature=0.0)) for each in EIGHT[:3]]
            expected = await unguessed(many, wanted)
            drafter: Any = many.decodes["decode-0"].core.rank.draft
            draft, release = drafter.draft, ModelDrafts.release
            wanted_late, computing, had_blocks = threading.Event(), threading.Event(), list[bool]()
            left = [threading.Event()]
            """One event for each client that is to leave, so that none is taken for the next one's."""

            def late(requests: Any) -> Any:
                """Computes once somebody has left, if somebody is to leave."""
                if wanted_late.is_set():
                    mine = left[-1]
                    computing.set()
                    assert mine.wait(60), "nobody left"
                return draft(requests)

            def released(self: ModelDrafts) -> None:
                if computing.is_set():
                    had_blocks.append(bool(self.blocks))
                    wanted_late.clear()
                    computing.clear()
                    left[-1].set()
                release(self)

            monkeypatch.setattr(ModelDrafts, "release", released)
            drafter.draft = late
            leaving = [asyncio.create_task(many.ask(prompt_of(40, n), SamplingParams(n, 3000))) for n in range(5)]
            await many.until(lambda: many.running("decode-0") == len(leaving))
            await many.until(lambda: many.draft_blocks() > 0)
            staying = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            for each in leaving:
                left.append(threading.Event())
                wanted_late.set()
                await many.until(computing.is_set)
                each.cancel()
                await many.until(left[-1].is_set)
            await asyncio.wait(leaving)
            assert [each.token_ids for each in await asyncio.gather(*staying)] == [each.token_ids for each in expected]
            assert len(had_blocks) == len(leaving), "each left while drafts were computed"
            assert any(had_blocks)

    run(scenario())


def test_answers_go_on_without_a_draft_model_that_fails(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises once, with many streams; no answer is the worse for it, and the worker lives."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts["right"]) as many:
            wanted = cases(3)
            expected = await unguessed(many, wanted)
            drafter: Any = many.decodes["decode-0"].core.rank.draft
            calls, draft = [0], drafter.draft

            def failing(requests: Any) -> Any:
                calls[0] += 1
                if calls[0] == 8:
                    raise RuntimeError("no memory for drafts")
                return draft(requests)

            drafter.draft = failing
            answers = await ask(many, wanted)
            assert said(answers) == said(expected)
            assert sum(answer.resumes for answer in answers) == 0
            assert calls[0] == 8
            assert report(many).draft_tokens > 0
            assert many.draft_blocks() == 0

    run(scenario())
    [told] = [record for record in caplog.records if "drafts no more" in record.getMessage()]
    assert told.exc_info is not None, "with the traceback"


def test_nothing_is_drafted_beyond_the_draft_models_context(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], any_counts: None
) -> None:
    short = replace(drafts["right"], max_model_len=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=short) as many:
            plain = SamplingParams(seed=1, max_tokens=100, temperature=0.0)
            wanted = [(prompt_of(20), plain), (prompt_of(64), plain), (prompt_of(100), plain)]
            expected = await unguessed(many, wanted)
            answers = await ask(many, wanted)
            assert said(answers) == said(expected)
            assert 20 < report(many).draft_tokens <= 50 * 5
            assert many.draft_blocks() == 0

    run(scenario())


def test_drafts_that_pay_are_made(small_model: ModelFacts, drafts: dict[str, ModelFacts]) -> None:
    """Nothing is made up here. A step of the served model takes a tenth of a second longer, so drafts are cheap anywhere."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts["right"]) as many:
            wanted = [(prompt, SamplingParams(seed=1, max_tokens=150, temperature=0.0)) for prompt in EIGHT[:3]]
            expected = await unguessed(many, wanted)
            many.step_s = 0.1
            before = report(many)
            assert said(await ask(many, wanted)) == said(expected)
            after = report(many)
            tokens = after.tokens - before.tokens
            assert after.accepted_tokens > tokens / 2
            assert after.steps - before.steps < tokens / len(wanted) / 2

    run(scenario())


@pytest.mark.slow
def test_drafts_that_do_not_pay_are_not_made_and_that_is_told(
    small_model: ModelFacts, drafts: dict[str, ModelFacts], caplog: pytest.LogCaptureFixture
) -> None:
    """The draft model is slower than the served one. It is asked now and then."""
    caplog.set_level("INFO", logger="decode_workers.worker")

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, drafting(CONFIG, max_batch_size=64), draft=drafts["right"]) as many:
            drafter: Any = many.decodes["decode-0"].core.rank.draft
            asked, execute = [0], drafter._runner.execute

            def slow_execute(chunks: Any) -> Any:
                asked[0] += 1
                time.sleep(0.05)
                return execute(chunks)

            drafter._runner.execute = slow_execute
            many.step_s = 0.001
            sampling = SamplingParams(seed=1, max_tokens=RETRY + 200, temperature=0.0)
            await ask(many, [(prompt, sampling) for prompt in EIGHT[:3]])
            assert report(many).draft_tokens == 0
            assert asked[0] <= 3 * 2
            assert many.draft_blocks() == 0

    run(scenario())
    told = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert len(told) == 1
    assert "small does not pay with 3 streams" in told[0]
