"""A router's own pipeline with real workers: damaged KV costs a second prefill, and neither a token nor the answer.

The requests are penalized: what an answer must not repeat is counted anew at prefill, at decode and after a loss.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.transports.loopback import Faults
from protocol.cluster_view import ClusterView, RolloutObservation, RolloutOrder, RouterObservation, WorkerInfo, WorkerState
from protocol.messages.workers import Duty, Role
from router.dispatch.admission import Admission
from router.dispatch.journal import Journal
from router.dispatch.migrator import Migrator
from router.dispatch.revisions.watch import RolloutWatch
from router.dispatch.roster import Roster
from router.request.pipeline import Pipeline
from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, SECRET, TwoWorkers


class FixedController:
    """Knows these two workers and never anything new."""

    def __init__(self, workers: TwoWorkers) -> None:
        refs = ((Role.PREFILL, workers.prefill.me), (Role.DECODE, workers.decode.me))
        ready = WorkerState.READY
        infos = (WorkerInfo(ref.worker_id, role, ref.epoch, ready, ref, (), None, 0, None) for role, ref in refs)
        self._view = ClusterView(1, tuple(infos))

    async def watch(self, known_version: int) -> ClusterView:
        if known_version == self._view.version:
            await asyncio.Event().wait()
        return self._view

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        raise AssertionError("nobody scales here")

    async def flip(self, worker_id: str, duty: Duty) -> None:
        raise AssertionError("nobody flips here")

    async def drain(self, worker_id: str, restart: bool) -> None:
        raise AssertionError("nobody scales here")

    async def roll_out(self, order: RolloutOrder) -> int:
        raise NotImplementedError

    async def abort_rollout(self) -> int:
        raise NotImplementedError

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        raise NotImplementedError

    async def observe(self, seen: RouterObservation) -> None:
        raise AssertionError("nothing sizes itself here")

    async def autoscale(self, paused: str | None) -> None:
        raise AssertionError("nothing sizes itself here")

    async def note_open_requests(self, router_id: str, count: int) -> None:
        raise AssertionError("nobody shuts down here")


@pytest.mark.parametrize(
    "faults",
    [
        Faults(flip_bit_at=1),
        Faults(truncate_at=1),
        Faults(swap_blocks_at=1, block_bytes=8 * 2 * 8 * 4),
        Faults(die_at=1),
    ],
    ids=["flip", "truncate", "swap", "die"],
)
def test_damage_is_computed_again_and_counted(
    two_workers: Factory, reference: Reference, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with two_workers() as workers:
            metrics = Metrics("small", ClusterSample)
            controller = FixedController(workers)
            roster = Roster(controller, SECRET, CONFIG.limits, metrics.workers_lost.inc)
            migrator, watch = Migrator(CONFIG, roster, metrics), RolloutWatch(controller, roster)
            pipeline = Pipeline(Admission(CONFIG, roster, metrics, watch), migrator, CONFIG.limits, metrics, watch)
            roster.start()
            prompt = prompt_of(70)
            workers.network.faults = faults
            sampling = replace(greedy(20), repetition_penalty=1.3, frequency_penalty=0.4)
            journal = Journal(tuple(prompt), sampling, "")
            times = RequestTimes(time.monotonic())
            async for _ in pipeline.run(journal, times):
                pass
            assert journal.emitted == reference(prompt, 20, repetition=1.3, frequency=0.4) != reference(prompt, 20)
            assert _count(metrics.kv_transfer_failures) == 1
            assert _count(metrics.resumed_streams) == times.resumes <= 1
            await workers.until(workers.all_free)
            await roster.close()
            logged = [(record.name, getattr(record, "fields", {}).get("trace")) for record in caplog.records]
            parts = {name for name, trace in logged if trace == journal.trace.trace_id}
            if faults.die_at is not None:  # then the router may take the ticket back before decode has noticed
                parts.add("decode_workers.worker")
            assert parts == {
                "router.request.pipeline",
                "prefill_workers.worker",
                "decode_workers.worker",
                "decode_workers.attaches",
            }

    run(scenario())


def _count(counter: Any) -> float:
    [sample] = [sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")]
    return float(sample.value)
