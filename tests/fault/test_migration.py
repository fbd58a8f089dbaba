"""Streams move between decode workers while they run: each says what it would have said alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import DecodeConfig
from kv_transfer.transports.loopback import Faults
from protocol.cluster_view import WorkerState
from protocol.errors import TandemError
from protocol.messages.workers import Role
from protocol.sampling import SamplingParams
from tests.cases import seeds, slow
from tests.fault.many_decodes import CONFIG, COPYING, ManyDecodes, Said, run_many_decodes, varied
from tests.fault.scenarios import prompt_of, run

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
EIGHT = [prompt_of(20 + 11 * n, n) for n in range(8)]


def cases(seed: int, max_tokens: int, count: int = 8) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [(prompt, varied(rng, max_tokens)) for prompt in EIGHT[:count]]


async def undisturbed(many: ManyDecodes, wanted: list[tuple[list[int], SamplingParams]]) -> list[Said]:
    """Salted, so that nothing of it is found in a cache afterwards."""
    return await asyncio.gather(*(many.ask(prompt, sampling, salt="alone") for prompt, sampling in wanted))


def same(answers: list[Said], expected: list[Said]) -> bool:
    return [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def endless(max_tokens: int, **more: Any) -> SamplingParams:
    """Nothing but its length ends the answer."""
    return SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, **more)


async def elsewhere(many: ManyDecodes) -> None:
    """Have the one stream that runs move from one of the two workers to the other."""
    [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
    [target] = set(many.decodes) - {source}
    many.controller.mark(source, WorkerState.DRAINING)
    await many.until(lambda: many.running(target) == 1 and not many.running(source))
    many.controller.mark(source, WorkerState.READY)
    await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 2)


async def started(many: ManyDecodes, sampling: SamplingParams, prompt: list[int]) -> tuple[asyncio.Task[Said], Said]:
    """A request whose stream runs."""
    said = Said()
    asking = asyncio.create_task(many.ask(prompt, sampling, said))
    await many.until(lambda: len(said.token_ids) > 8)
    return asking, said


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_a_drained_worker_gives_its_streams_away(small_model: ModelFacts, seed: int) -> None:
    """Greedy and sampled, penalized, with logprobs: all move, none is computed anew, and the worker is soon idle."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            wanted = cases(seed, 300)
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in wanted]
            expected = await undisturbed(many, wanted)
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.to_empty()) == 1)
            many.step_s = 0.01  # so that streams still run when they are to move
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: many.running("decode-0") == 8)
            many.controller.mark("decode-1", WorkerState.READY)
            async with asyncio.timeout(20):
                await many.drain("decode-0")
            many.step_s = 0.0
            answers = await asyncio.gather(*asking)
            assert same(answers, expected)
            for answer, alone in zip(answers, expected, strict=True):
                logprobs = [entry.chosen for entry in alone.logprobs]
                assert [entry.chosen for entry in answer.logprobs] == pytest.approx(logprobs, abs=1e-3)
            assert sum(answer.resumes for answer in answers) == 0
            assert many.moves()["moved"] == 8

    run(scenario())


@pytest.mark.parametrize("ranks", [(1, 2), *slow([(2, 1), (2, 4)])])
def test_gangs_of_any_size_hand_streams_to_each_other(small_model: ModelFacts, ranks: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, ranks=ranks) as many:
            [expected] = await undisturbed(many, [(EIGHT[5], endless(300, repetition_penalty=1.1))])
            inexact = Counter(many.inexact())
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 1)
            many.step_s = 0.01  # so that it still runs when it is to move
            asking, _ = await started(many, endless(300, repetition_penalty=1.1), EIGHT[5])
            many.controller.mark("decode-1", WorkerState.READY)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 2)
            for _ in range(2):
                await elsewhere(many)
            many.step_s = 0.0
            answer = await asking
            assert (answer.token_ids, answer.resumes) == (expected.token_ids, 0)
            assert many.moves() == {"moved": 2}
            inexact["resumed" if ranks[0] == many.prefill.me.num_ranks else "mixed_kv"] += 1
            assert many.inexact() == inexact, "two moves, and one stream that is not exact"

    run(scenario())


def test_streams_that_wait_for_blocks_move_when_they_have_come_back(small_model: ModelFacts) -> None:
    """A pool that holds a third of them: while one of them is sent, others are preempted, and nobody is stuck."""

    async def scenario() -> None:
        tight = CONFIG.model_copy(update={"decode": DecodeConfig(kv_cache_tokens=512, max_batch_size=16, copy_every_tokens=0)})
        async with run_many_decodes(small_model, 2, tight) as many:
            wanted = [(prompt[:40], endless(150)) for prompt in EIGHT]
            expected = await undisturbed(many, wanted)
            many.step_s = 0.01  # so that most still run after all drains
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: any(many.running(worker_id) for worker_id in many.decodes))
            for number in range(12):
                source = f"decode-{number % 2}"
                many.controller.mark(source, WorkerState.DRAINING)
                await asyncio.sleep(0.05)
                many.controller.mark(source, WorkerState.READY)
            assert same(await asyncio.gather(*asking), expected)
            assert many.moves().get("moved")
            assert any(worker.core.load().num_preemptions for worker in many.decodes.values())

    run(scenario())


@pytest.mark.slow
def test_an_answer_that_follows_a_grammar_follows_it_at_the_next_worker(small_model: ModelFacts) -> None:
    """Its state is built anew there, also from the tokens that were said while the stream was sent."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            grammar = '%llguidance {"no_forcing": true}\nstart: /[ -!#-[^-~]{200,400}/'
            sampling = SamplingParams(seed=3, max_tokens=300, temperature=1.0, grammar=grammar)
            wanted = [(prompt, replace(sampling, seed=seed)) for seed, prompt in enumerate(EIGHT[:4])]
            expected = await undisturbed(many, wanted)
            many.step_s = 0.01  # so that streams still run when they are to move
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: sum(many.running(worker_id) for worker_id in many.decodes) == 4)
            [source, *_] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            await many.drain(source)
            many.step_s = 0.0
            assert same(await asyncio.gather(*asking), expected)
            assert many.moves()["moved"] >= 1

    run(scenario())


@pytest.mark.slow
def test_choices_of_one_prompt_move_each_by_itself(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            sampling = SamplingParams(seed=5, max_tokens=300, temperature=1.0)
            wanted = [(EIGHT[4], replace(sampling, choice=choice)) for choice in range(4)]
            expected = await undisturbed(many, wanted)
            assert len({tuple(answer.token_ids) for answer in expected}) == 4
            many.step_s = 0.01  # so that streams still run when they are to move
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: sum(many.running(worker_id) for worker_id in many.decodes) == 4)
            [source, *_] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            await many.drain(source)
            many.step_s = 0.0
            assert same(await asyncio.gather(*asking), expected)

    run(scenario())


@pytest.mark.slow
def test_a_full_worker_gives_streams_to_one_that_joins(small_model: ModelFacts) -> None:
    """Sixteen streams begin on one worker, and another comes up. They last for several of the router's looks."""
    config = CONFIG.model_copy(update={"decode": DecodeConfig(kv_cache_tokens=8192, max_batch_size=16, copy_every_tokens=0)})

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.to_empty()) == 1)
            wanted = [(prompt_of(10, n), endless(480)) for n in range(16)]
            expected = await undisturbed(many, wanted)
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: many.running("decode-0") == 16)
            many.controller.mark("decode-1", WorkerState.READY)
            await many.until(lambda: many.running("decode-1") > 0 and not many.migrator._moves)
            assert 1 <= many.moves("balance")["moved"] <= 8, "half of them at most"
            assert same(await asyncio.gather(*asking), expected)

    run(scenario())


def test_no_stream_moves_for_a_load_that_has_gone_already(small_model: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the streams have left a full worker, whose last report is from before: it looks full still."""
    config = CONFIG.model_copy(update={"decode": DecodeConfig(kv_cache_tokens=8192, max_batch_size=16, copy_every_tokens=0)})

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            many.step_s = 0.02
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.to_empty()) == 1)
            asking = [asyncio.create_task(many.ask(prompt_of(10, n), endless(200))) for n in range(16)]
            full = many.roster.ready_decode("decode-0")
            assert full is not None
            await many.until(lambda: full.report is not None and full.report.running == 16)
            with monkeypatch.context() as late:
                late.setattr(full, "_on_load_report", lambda report, now: None)
                many.controller.mark("decode-1", WorkerState.READY)
                await many.until(lambda: many.moves("balance").get("moved", 0) > 0 and not many.migrator._moves)
                assert many.moves("balance")["moved"] <= 8, "half of them at most"
                many.migrator._balance()
                assert not many.migrator._moves
            await asyncio.gather(*asking)

    run(scenario())


def test_a_slow_client_holds_up_no_drain(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            [expected] = await undisturbed(many, [(EIGHT[0], endless(400))])
            said = Said()
            asking = asyncio.create_task(many.ask(EIGHT[0], endless(400), said, pace_s=0.2))
            await many.until(lambda: len(said.token_ids) > 1)
            [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            async with asyncio.timeout(1):
                await many.drain(source)
            assert (await asking).token_ids == expected.token_ids

    run(scenario())


def test_only_what_the_target_does_not_hold_is_sent(small_model: ModelFacts) -> None:
    """A prompt that the other worker has cached, and a stream that comes back to where its KV still is."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            many.step_s = 0.01  # so that it still runs when it is to move, and says little meanwhile
            asking, _ = await started(many, endless(600), prompt_of(800))
            sent = []
            for _ in range(3):
                before = many.network.bytes_sent
                await elsewhere(many)
                sent.append(many.network.bytes_sent - before)
            many.step_s = 0.0
            first_time, *again = sent
            assert first_time > 800 * BYTES_PER_TOKEN
            assert max(again) < first_time / 2, "what it had said meanwhile"
            assert len((await asking).token_ids) == 600

    run(scenario())


def test_without_room_elsewhere_streams_are_waited_for(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 1) as many:
            asking, _ = await started(many, endless(300), EIGHT[0])
            await many.drain("decode-0")
            assert len((await asking).token_ids) == 300

    run(scenario())


def test_a_cancel_in_each_phase_frees_both_workers(small_model: ModelFacts) -> None:
    """At a hundred moments of a migration that is made slow."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            source = "decode-0"
            for number in range(40):
                asking, _ = await started(many, endless(2000), prompt_of(200, number))
                [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
                many.network.faults = Faults(delay_s=0.002)
                many.controller.mark(source, WorkerState.DRAINING)
                await asyncio.sleep(number * 0.001)
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking
                await many.until(many.all_free)
                many.controller.mark(source, WorkerState.READY)
                many.network.faults = Faults()

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [Faults(flip_bit_at=0), Faults(die_at=0), Faults(truncate_at=0), Faults(swap_blocks_at=0, block_bytes=8 * 2 * 8 * 4)],
    ids=["flip", "die", "truncate", "swap"],
)
def test_damage_leaves_the_stream_where_it_was(small_model: ModelFacts, faults: Faults) -> None:
    """It is noticed before a token is made of it; the stream goes on, and moves at the next attempt."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            [expected] = await undisturbed(many, [(EIGHT[3], endless(1500))])
            many.step_s = 0.004  # so that it still runs at the next attempt
            asking, _ = await started(many, endless(1500), EIGHT[3])
            [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            many.network.faults = faults
            many.network.payloads_sent = 0
            async with asyncio.timeout(10):
                await many.drain(source)
            many.step_s = 0.0
            answer = await asking
            assert answer.token_ids == expected.token_ids
            assert answer.resumes == 0
            assert many.moves() == {"failed": 1, "moved": 1}

    run(scenario())


@pytest.mark.parametrize("dies", ["source", "target"])
@pytest.mark.parametrize("after_s", [0.03, *slow([0.0, 0.01, 0.06])])
def test_the_death_of_either_loses_no_token(small_model: ModelFacts, dies: str, after_s: float) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 3) as many:
            wanted = [(prompt, endless(400)) for prompt in EIGHT[:4]]
            expected = await undisturbed(many, wanted)
            for worker_id in ("decode-1", "decode-2"):
                many.controller.mark(worker_id, WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.to_empty()) == 2)
            asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
            await many.until(lambda: many.running("decode-0") == 4)
            many.controller.mark("decode-1", WorkerState.READY)
            many.network.faults = Faults(delay_s=0.003)
            many.controller.mark("decode-0", WorkerState.DRAINING)
            await asyncio.sleep(after_s)
            await many.kill("decode-0" if dies == "source" else "decode-1")
            many.controller.mark("decode-2", WorkerState.READY)
            assert same(await asyncio.gather(*asking), expected)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 8, thorough=300))
def test_random_drains_cancels_faults_and_a_death_lose_nothing(small_model: ModelFacts, seed: int) -> None:
    """Ten requests, copied meanwhile, on three workers that drain in turn; what was not cancelled is exact."""

    async def scenario() -> None:
        rng = random.Random(seed)
        wanted = [(prompt_of(rng.randrange(1, 150), n), varied(rng, rng.randrange(20, 250))) for n in range(10)]
        async with run_many_decodes(small_model, 3, COPYING) as many:
            expected = await undisturbed(many, wanted)
            many.network.faults = Faults(
                delay_s=0.001,
                flip_bit_at=many.network.payloads_sent + rng.randrange(150),
                truncate_at=many.network.payloads_sent + rng.randrange(150),
                die_at=rng.choice([None, many.network.payloads_sent + rng.randrange(150)]),
            )

            async def one(number: int) -> None:
                prompt, sampling = wanted[number]
                try:
                    async with asyncio.timeout(rng.choice([None, None, rng.random()])):
                        answer = await many.ask(prompt, sampling)
                except TimeoutError:
                    return
                assert answer.token_ids == expected[number].token_ids

            async def disturb() -> None:
                victim = rng.choice([None, None, "decode-2"])
                for _ in range(12):
                    source = f"decode-{rng.randrange(3)}"
                    many.controller.mark(source, WorkerState.DRAINING)
                    await asyncio.sleep(rng.random() * 0.1)
                    many.controller.mark(source, WorkerState.READY)
                    if victim is not None and rng.random() < 0.2:
                        await many.kill(victim)
                        victim = None

            disturbing = asyncio.create_task(disturb())
            with suppress(TandemError):
                await asyncio.gather(*(one(number) for number in range(10)))
            await disturbing

    run(scenario())


@pytest.mark.filterwarnings("error")
def test_a_worker_that_ends_begins_nothing_more(small_model: ModelFacts) -> None:
    """A question that it still reads does not turn its end into an error."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1) as many:
            worker, task = many.decodes["decode-0"], many.tasks["decode-0"]
            task.cancel()
            refused = 0
            while not task.done():
                work: Any = asyncio.sleep(60)
                worker.core.spawn(work)
                refused += work.cr_frame is None
                await asyncio.sleep(0)
            assert task.cancelled()
            assert refused, "it was asked while it ended"

    run(scenario())
