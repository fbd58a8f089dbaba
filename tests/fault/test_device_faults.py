"""GPUs fail or hang while they compute: their worker ends, and every client gets the tokens of a run without faults."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from configs.facts import ModelFacts
from decode_workers.worker import DecodeWorker
from engine.batch import Chunk
from prefill_workers.worker import PrefillWorker
from protocol.errors import WorkerLostError
from protocol.gang import STEP_LEASES
from protocol.messages.workers import Role
from tests.fault.many_decodes import ManyDecodes, Said, run_many_decodes, varied
from tests.fault.scenarios import Factory, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, with_lease

FAULTS = [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: an illegal memory access")]
SHORT_S = 0.5
of_every_kind = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)


def break_device(worker: PrefillWorker | DecodeWorker, fault: Exception) -> None:
    """From now on every step writes and sends its KV as ever, and then fails."""
    runner: Any = worker.core.rank.runner
    execute = runner.execute

    def failing(chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> None:
        execute(chunks, on_layer)
        raise fault

    runner.execute = failing


async def ended_by(task: asyncio.Task[None], fault: Exception) -> None:
    """Wait until a worker has ended, for this reason."""
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(task, 10)
    assert ended.group_contains(type(fault))


@of_every_kind
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_fault_of_the_device_ends_its_worker(two_workers: Factory, role: str, fault: Exception) -> None:
    """A GPU that has failed computes nothing right any more."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            assert len(await router.generate(prompt_of(20), greedy(4))) == 4
            break_device(getattr(workers, role), fault)
            answering = asyncio.create_task(router.generate(prompt_of(20, 1), greedy(4)))
            await ended_by(workers.tasks[role], fault)
            answering.cancel()
            await asyncio.wait((answering,))
            await workers.bury(Role(role))

    run(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_that_never_ends_ends_its_worker(two_workers: Factory, role: str) -> None:
    """Routers send it nothing by then, and nobody else would ever take its place."""
    released = threading.Event()

    async def scenario() -> None:
        async with two_workers(with_lease(CONFIG, SHORT_S)) as workers:
            router = await workers.router()
            assert len(await router.generate(prompt_of(20), greedy(4))) == 4
            runner: Any = getattr(workers, role).core.rank.runner
            runner.execute = lambda *_: released.wait()
            answering = asyncio.create_task(router.generate(prompt_of(20, 1), greedy(4)))
            began = time.monotonic()
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(workers.tasks[role], 30)
            assert ended.group_contains(WorkerLostError, match="stuck in a step")
            assert time.monotonic() - began > STEP_LEASES * SHORT_S
            answering.cancel()
            await asyncio.wait((answering,))
            await workers.bury(Role(role))

    try:
        run(scenario())
    finally:
        released.set()


WANTED = [(prompt_of(30 + 17 * n, n), varied(random.Random(n), 60)) for n in range(4)]


async def answered_alone(many: ManyDecodes) -> list[list[int]]:
    """The tokens without a fault; salted, so that nothing of them is found in a cache afterwards."""
    answers = await asyncio.gather(*(many.ask(*each, salt="alone") for each in WANTED))
    return [answer.token_ids for answer in answers]


@pytest.mark.slow
@of_every_kind
def test_streams_of_a_broken_device_go_on_elsewhere(small_model: ModelFacts, fault: Exception) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            expected = await answered_alone(many)
            many.step_s = 0.004  # so that all streams still run when the device fails
            said = [Said() for _ in WANTED]
            asking = [asyncio.create_task(many.ask(*each, mine)) for each, mine in zip(WANTED, said, strict=True)]
            await many.until(lambda: all(len(each.token_ids) > 5 for each in said))
            assert many.running("decode-0") + many.running("decode-1") == len(WANTED)
            held = many.running("decode-0")
            assert held > 0
            break_device(many.decodes["decode-0"], fault)
            await ended_by(many.tasks["decode-0"], fault)
            await many.bury("decode-0")
            answers = await asyncio.gather(*asking)
            assert [answer.token_ids for answer in answers] == expected
            assert sum(answer.resumes for answer in answers) == held

    run(scenario())


@pytest.mark.slow
@of_every_kind
def test_prompts_of_a_broken_device_are_computed_elsewhere(small_model: ModelFacts, fault: Exception) -> None:
    """Their KV has arrived where it was to go, but nobody has said so."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2) as many:
            expected = await answered_alone(many)
            await many.flip("decode-1")
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            break_device(many.prefill, fault)
            asking = [asyncio.create_task(many.ask(*each)) for each in WANTED]
            await ended_by(many.tasks["prefill-0"], fault)
            await many.bury("prefill-0")
            answers = await asyncio.gather(*asking)
            assert [answer.token_ids for answer in answers] == expected

    run(scenario())
