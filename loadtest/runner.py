"""The run itself: every request at its planned time, whatever became of those before it.

A server that gets slow must not make its own load lighter, or the worst moments would be measured least (coordinated
omission). So send times are fixed beforehand, and nothing waits for an answer unless `max_concurrency` says so; then the wait
is in the record. What the client itself is late is measured, and so is how long its loop was held up, for then its stamps are
late as well.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.arrivals import Times
from loadtest.datasets import Sample
from loadtest.http_client import HttpClient
from loadtest.records import RequestRecord
from loadtest.server import Target, ask

LATE_S = 0.01
"""Seconds of lateness at the 99th percentile above which the client takes part in what it measures."""
_LAG_PERIOD_S = 0.02


@dataclass(frozen=True)
class ClientHealth:
    """How well this client kept up with its plan. Times are in seconds."""

    p99_lateness: float
    """Lateness of dispatching requests after their planned times, at the 99th percentile."""
    p99_loop_lag: float
    cpu_share: float
    """Processor time that the client used, as a share of one core."""

    @property
    def warning(self) -> str | None:
        """Why the figures are not the server's alone; None if they are."""
        slow = []
        if self.p99_lateness > LATE_S:
            slow.append(f"requests left up to {self.p99_lateness * 1000:.1f} ms late (p99)")
        if self.p99_loop_lag > LATE_S:
            slow.append(f"its event loop was held up for {self.p99_loop_lag * 1000:.1f} ms (p99)")
        if not slow:
            return None
        return (
            f"this client was the bottleneck: {' and '.join(slow)}, with {self.cpu_share:.0%} of a core; "
            "latencies are overstated. Give it a core of its own, or a lower rate."
        )


@dataclass(frozen=True)
class RunResult:
    """What a run gave: a record of each request, and how well the client kept up."""

    records: list[RequestRecord]
    duration_s: float
    """Seconds from the start of the run to the end of the last request."""
    client: ClientHealth


async def run_load(
    client: HttpClient,
    target: Target,
    samples: Sequence[Sample],
    planned: Times,
    max_concurrency: int | None,
    on_done: Callable[[RequestRecord], None],
) -> RunResult:
    """Send `samples[i]` at `planned[i]` seconds from now. `on_done` is told of every request that has ended."""
    bodies = [target.body(sample) for sample in samples]  # before the clock runs
    records = [
        RequestRecord(index=index, prompt_len=sample.prompt_len, output_len=sample.output_len, at_planned=float(at))
        for index, (sample, at) in enumerate(zip(samples, planned, strict=True))
    ]
    room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    lags: list[float] = []
    # Prompts are many small objects; a full collection would go through all of them, again and again.
    gc.collect()
    gc.freeze()
    watching = asyncio.create_task(_watch_loop(lags))
    cpu, start = time.process_time(), time.monotonic()
    try:
        async with asyncio.TaskGroup() as tasks:
            for record in sorted(records, key=lambda each: each.at_planned):
                wait_s = start + record.at_planned - time.monotonic()
                await asyncio.sleep(max(0.0, wait_s))
                record.at_dispatched = time.monotonic() - start
                tasks.create_task(_request(client, target, bodies[record.index], record, room, start, on_done))
    finally:
        duration_s, cpu_s = time.monotonic() - start, time.process_time() - cpu
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        gc.unfreeze()
    health = ClientHealth(_p99([record.lateness for record in records]), _p99(lags), cpu_s / duration_s if duration_s else 0.0)
    return RunResult(records, duration_s, health)


async def _request(
    client: HttpClient,
    target: Target,
    body: bytes,
    record: RequestRecord,
    room: asyncio.Semaphore | None,
    start: float,
    on_done: Callable[[RequestRecord], None],
) -> None:
    if room is None:
        record.at_sent = time.monotonic() - start
        await ask(client, target, body, record)
    else:
        async with room:
            record.at_sent = time.monotonic() - start
            await ask(client, target, body, record)
    on_done(record)


async def _watch_loop(lags: list[float]) -> None:
    """How much later than asked for the loop comes back, until cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(time.monotonic() - began - _LAG_PERIOD_S)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
