"""The usage events that wait at a router when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from router.access.usage import queue as usage_queue
from router.access.usage.budgets import MonthlyBudgets
from router.access.usage.queue import UsageQueue
from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics
from telemetry.usage.event import UsageEvent
from telemetry.usage.ledger import MonthUse
from tests.unit.telemetry.usage.events import event


class Restarting:
    """A UsageStore that is away for some calls."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.written: list[UsageEvent] = []

    async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("the keeper is started anew")
        self.written += events
        return MonthUse("2026-11", "e", 1, {}, whole=True)


def lost(metrics: Metrics) -> int:
    text = metrics.render(metrics.sample()).decode()
    [line] = [line for line in text.splitlines() if line.startswith("tandem:usage_events_lost_total")]
    return int(float(line.split()[-1]))


def test_a_router_that_ends_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_queue, "_PAUSE_S", 0.001)

    async def main() -> None:
        store, metrics = Restarting(2), Metrics("m", ClusterSample)
        queue = UsageQueue(store, MonthlyBudgets(), metrics)
        queue.start()
        queue.put(event(1))
        await queue.close()
        assert (store.written, lost(metrics)) == ([event(1)], 0)

    asyncio.run(main())


def test_what_ends_after_the_queue_is_counted_as_lost() -> None:
    async def main() -> None:
        store, metrics = Restarting(0), Metrics("m", ClusterSample)
        queue = UsageQueue(store, MonthlyBudgets(), metrics)
        queue.start()
        await queue.close()
        queue.put(event(1))
        assert (len(queue), lost(metrics)) == (0, 1)

    asyncio.run(main())


def test_an_owner_that_is_slow_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang in a write, and would hold a copy of the events for every further call."""
    monkeypatch.setattr(usage_queue, "_PAUSE_S", 0.001)
    monkeypatch.setattr(usage_queue, "_ANSWER_S", 0.01)

    class Slow(Restarting):
        def __init__(self) -> None:
            super().__init__(0)
            self.goes_on, self.num_asked = asyncio.Event(), 0

        async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
            self.num_asked += bool(events)
            await self.goes_on.wait()
            return await super().append(events, known)

    async def main() -> None:
        store, metrics = Slow(), Metrics("m", ClusterSample)
        queue = UsageQueue(store, MonthlyBudgets(), metrics)
        store.goes_on.set()
        queue.start()
        await asyncio.sleep(0.005)  # it asks what the month has used so far
        store.goes_on.clear()
        queue.put(event(1))
        await asyncio.sleep(0.2)
        queue.put(event(2))
        await asyncio.sleep(0.2)
        assert (store.num_asked, store.written) == (1, [])
        store.goes_on.set()
        await queue.close()
        assert (store.written, lost(metrics)) == ([event(1), event(2)], 0)

    asyncio.run(main())
