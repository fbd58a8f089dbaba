"""Running streams have copies of their KV at other decode workers: a death costs what was said since, and nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, DecodeConfig, HttpConfig
from kv_transfer.transports.loopback import Faults
from protocol.cluster_view import WorkerState
from protocol.sampling import SamplingParams
from tests.cases import seeds, slow
from tests.fault.many_decodes import COPYING, ManyDecodes, Said, run_many_decodes, varied
from tests.fault.scenarios import prompt_of, run

EVERY = COPYING.decode.copy_every_tokens
PROMPT = prompt_of(100)


def endless(max_tokens: int) -> SamplingParams:
    """Nothing but its length ends the answer."""
    return SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)


async def started(many: ManyDecodes, num_tokens: int) -> tuple[asyncio.Task[Said], Said, str]:
    """A stream of the prompt that lasts for some copies, and the worker that runs it."""
    many.step_s = 0.004
    said = Said()
    asking = asyncio.create_task(many.ask(PROMPT, endless(num_tokens), said))
    await many.until(lambda: len(said.token_ids) > 2)
    [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
    return asking, said, source


def computed(many: ManyDecodes) -> int:
    """Tokens of prompts and of answers that were computed anew, at all workers that live."""
    return sum(worker.core.load().prefilled_tokens for worker in many.alive())


@pytest.mark.parametrize("mode", slow(["always", "auto", "never"]))
def test_what_a_killed_worker_said_need_not_be_computed_again(small_model: ModelFacts, mode: str) -> None:
    config = ClusterConfig.model_validate({**COPYING.model_dump(), "disaggregation": mode})

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            alone = await many.ask(PROMPT, endless(1200), salt="alone")
            asking, said, source = await started(many, 1200)
            await many.until(lambda: len(said.token_ids) > 800 and many.copies().get("copied", 0) > 3)
            at_death, before = len(said.token_ids), computed(many)
            before -= many.decodes[source].core.load().prefilled_tokens
            await many.kill(source)
            answer = await asking
            assert answer.token_ids == alone.token_ids
            assert answer.resumes == 1
            assert computed(many) - before < at_death / 2, "its prompt and most of what it had said were there"

    run(scenario())


def test_no_token_is_lost_that_an_interval_holds_back(small_model: ModelFacts) -> None:
    """Neither when the stream moves, nor when its worker dies."""
    config = COPYING.model_copy(update={"http": HttpConfig(stream_interval=4)})

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            alone = await many.ask(PROMPT, endless(300), salt="alone")
            asking, said, source = await started(many, 300)
            await many.until(lambda: len(said.token_ids) > 4 * EVERY)
            assert len(said.token_ids) % 4 == 2, "the first of each worker, and then four at a time"
            many.controller.mark(source, WorkerState.DRAINING)
            await many.until(lambda: many.moves() == {"moved": 1})
            many.controller.mark(source, WorkerState.READY)
            at_move = len(said.token_ids)
            await many.until(lambda: len(said.token_ids) > at_move + 2 * EVERY)
            [target] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            await many.kill(target)
            assert (await asking).token_ids == alone.token_ids

    run(scenario())


def test_a_copy_takes_room_from_nobody(small_model: ModelFacts) -> None:
    """The worker that has it can give all its blocks to others."""
    config = COPYING.model_copy(update={"decode": DecodeConfig(kv_cache_tokens=1024, copy_every_tokens=EVERY)})

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            asking, _, source = await started(many, 500)
            [other] = [worker for worker_id, worker in many.decodes.items() if worker_id != source]
            await many.until(lambda: many.copies().get("copied", 0) > 1)
            await many.until(lambda: other.core.load().free_blocks == other.core.load().total_blocks)
            large = asyncio.create_task(many.ask(prompt_of(900, 7), endless(50)))
            await many.until(lambda: other.core.load().running == 1)
            assert other.core.load().free_blocks < other.core.load().total_blocks / 8
            assert len((await large).token_ids) == 50
            assert len((await asking).token_ids) == 500

    run(scenario())


@pytest.mark.slow
def test_each_copy_sends_what_the_last_one_has_not(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, COPYING) as many:
            before = many.network.bytes_sent
            asking, said, _ = await started(many, 600)
            await asking
            copied = many.copies()["copied"]
            assert copied > 3
            bytes_per_token = 2 * 2 * 2 * 8 * 4
            prefilled_and_copied = len(PROMPT) + len(PROMPT) + len(said.token_ids)
            assert many.network.bytes_sent - before <= prefilled_and_copied * bytes_per_token * 1.1

    run(scenario())


@pytest.mark.slow
def test_kv_of_another_arithmetic_is_neither_copied_nor_cached_where_it_moves(small_model: ModelFacts) -> None:
    """Two decode workers of one arithmetic, and a prompt that another one has computed."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, COPYING, ranks=(2, 2)) as many:
            asking, said, source = await started(many, 400)
            await many.until(lambda: len(said.token_ids) > 8 * EVERY)
            many.controller.mark(source, WorkerState.DRAINING)
            await many.until(lambda: many.moves() == {"moved": 1})
            many.controller.mark(source, WorkerState.READY)
            await asking
            assert many.inexact() == {"mixed_kv": 1}
            assert many.copies() == {}
            assert [worker.core.cache.num_cached for worker in many.decodes.values()] == [0, 0]

    run(scenario())


@pytest.mark.slow
def test_a_stream_moves_to_its_copy_and_has_the_next_one_elsewhere(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, COPYING) as many:
            alone = await many.ask(PROMPT, endless(900), salt="alone")
            asking, _, first = await started(many, 900)
            await many.until(lambda: many.copies().get("copied", 0) > 1)
            [second] = set(many.decodes) - {first}
            many.controller.mark(first, WorkerState.DRAINING)
            await many.until(lambda: many.running(second) == 1 and not many.running(first))
            many.controller.mark(first, WorkerState.READY)
            copied = many.copies()["copied"]
            await many.until(lambda: many.copies()["copied"] > copied + 1)
            assert not asking.done()
            await many.kill(second)
            assert (await asking).token_ids == alone.token_ids

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("faults", [Faults(flip_bit_at=0), Faults(truncate_at=0), Faults(die_at=0), Faults(lose_at=0)])
def test_a_damaged_copy_is_none(small_model: ModelFacts, faults: Faults) -> None:
    """It is tried again, the stream does not notice, and what comes after a death is right."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, COPYING) as many:
            alone = await many.ask(PROMPT, endless(1200), salt="alone")
            asking, said, source = await started(many, 1200)
            many.network.faults, many.network.payloads_sent = faults, 0
            await many.until(lambda: bool(many.copies().get("failed")) and bool(many.copies().get("copied")))
            assert not asking.done()
            await many.kill(source)
            assert (await asking).token_ids == alone.token_ids
            assert said.resumes == 1

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 4, thorough=200))
def test_random_deaths_cancels_and_faults_leave_nothing(small_model: ModelFacts, seed: int) -> None:
    """Ten requests on three workers, two of which die; what was not cancelled is exact."""

    async def scenario() -> None:
        rng = random.Random(seed)
        wanted = [(prompt_of(rng.randrange(1, 150), n), varied(rng, rng.randrange(50, 400))) for n in range(10)]
        async with run_many_decodes(small_model, 3, COPYING) as many:
            alone = await asyncio.gather(*(many.ask(prompt, sampling, salt="alone") for prompt, sampling in wanted))
            sent = many.network.payloads_sent
            many.network.faults = Faults(delay_s=0.001, flip_bit_at=sent + rng.randrange(200))

            async def one(number: int) -> None:
                prompt, sampling = wanted[number]
                try:
                    async with asyncio.timeout(rng.choice([None, None, 2 * rng.random()])):
                        answer = await many.ask(prompt, sampling, pace_s=0.002)
                except TimeoutError:
                    return
                assert answer.token_ids == alone[number].token_ids

            async def disturb() -> None:
                for worker_id in rng.sample(sorted(many.decodes), 2):
                    await asyncio.sleep(rng.random())
                    await many.kill(worker_id)

            await asyncio.gather(disturb(), *(one(number) for number in range(len(wanted))))

    run(scenario())
