"""Where the time of a request went, with real workers: all of it is in the ledger, and in the stage where it was spent."""

from __future__ import annotations

import asyncio
import time

import pytest

from kv_transfer.transports.loopback import Faults
from protocol.messages.handoff import PushCommit
from router.dispatch.admission import Admission
from router.dispatch.journal import Journal
from router.dispatch.migrator import Migrator
from router.dispatch.revisions.watch import RolloutWatch
from router.dispatch.roster import Roster
from router.request.pipeline import Pipeline
from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes
from tests.fault.scenarios import Factory, greedy, prompt_of, run
from tests.fault.test_resume import FixedController
from tests.fault.two_workers import CONFIG, SECRET

HELD_UP_S = 0.3
ROUNDING_S = 1e-4


async def answer(
    workers: object, num_tokens: int, faults: Faults | None = None
) -> tuple[RequestTimes, tuple[float, float], float]:
    """The ledger of a whole answer, what it took at least and at most by this function's own clock, and the moment of its end.

    Between two looks at a clock a busy machine may hold this process.
    """
    metrics = Metrics("small", ClusterSample)
    controller = FixedController(workers)  # type: ignore[arg-type]
    roster = Roster(controller, SECRET, CONFIG.limits, metrics.workers_lost.inc)
    migrator, watch = Migrator(CONFIG, roster, metrics), RolloutWatch(controller, roster)
    pipeline = Pipeline(Admission(CONFIG, roster, metrics, watch), migrator, CONFIG.limits, metrics, watch)
    roster.start()
    if faults is not None:
        workers.network.faults = faults  # type: ignore[attr-defined]
    begins = time.perf_counter()
    times = RequestTimes(time.monotonic())
    began = time.perf_counter()
    async for _ in pipeline.run(Journal(tuple(prompt_of(70)), greedy(num_tokens), ""), times):
        pass
    ends = time.perf_counter()
    times.finish = end = time.monotonic()
    ended = time.perf_counter()
    await roster.close()
    return times, (ends - began, ended - begins), end


def test_stages_are_the_wall_time(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            engine_began = workers.decode.core.load().busy_s
            times, (least, most), end = await answer(workers, 120)
            stages = times.stages(end)
            assert least - ROUNDING_S <= sum(stages.values()) <= most + ROUNDING_S
            assert all(stages[stage] > 0 for stage in ("queue", "prefill_queue", "prefill", "decode_step"))
            busy_s = workers.decode.core.load().busy_s - engine_began
            # A step may begin before the router has heard that it may, or of the step before it: so much of it is in no step.
            heard = sum(stages[stage] for stage in ("handoff_wait", "decode_queue", "decode_step", "decode_gap"))
            assert busy_s <= heard, "what the engine computed is inside of what the router saw of decoding"
            assert len(times.token_gaps) == 119
            assert sum(times.token_gaps) <= most
            await workers.until(workers.all_free)

    run(scenario())


def test_a_slow_transfer_is_told_as_one(two_workers: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            await workers.until(lambda: PushCommit in workers.decode.core.endpoint._handlers)
            handlers = workers.decode.core.endpoint._handlers
            commit = handlers[PushCommit]

            moments: list[float] = []

            def handle(prefill: bytes, message: PushCommit) -> None:
                moments.append(time.monotonic())
                commit(prefill, message)

            def late(prefill: bytes, message: PushCommit) -> None:
                moments.append(time.monotonic())
                asyncio.get_running_loop().call_later(HELD_UP_S, handle, prefill, message)

            monkeypatch.setitem(handlers, PushCommit, late)
            times, (_, most), end = await answer(workers, 5)
            stages = times.stages(end)
            came, handled = moments
            assert HELD_UP_S * 0.8 < stages["transfer"] < handled - came + 1.0
            assert stages["handoff_wait"] < most - HELD_UP_S * 0.8
            assert times.token_gaps[0] > HELD_UP_S * 0.8, "the second token had to wait for it"
            await workers.until(workers.all_free)

    run(scenario())


def test_damage_is_told_as_lost_work(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            times, (least, most), end = await answer(workers, 20, Faults(flip_bit_at=1))
            stages = times.stages(end)
            assert stages["lost"] > 0
            assert times.resumes == 1
            assert least - ROUNDING_S <= sum(stages.values()) <= most + ROUNDING_S
            await workers.until(workers.all_free)

    run(scenario())
