"""What a router needs to note usage: the log's owner as its store, and the log's sums in its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cluster.ray.errors import answer
from cluster.ray.front import counts_folder
from router.access.usage.noting import UsageNotes
from router.service import Router
from telemetry.usage.event import UsageEvent
from telemetry.usage.ledger import MonthUse
from telemetry.usage.totals import TOTALS, UsageTotals


class RayUsageStore:
    """A `router.access.usage.queue.UsageStore` over the handle of a keeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
        """Add those events that are not there yet. Raises TandemError if they may be there, or not."""
        return cast(MonthUse, await answer(self._keeper.append.remote(events, known)))


def start_usage_notes(router: Router, keeper: Any) -> UsageNotes:
    """Begin to note what this router's requests use, and return what notes it. Called in the router's loop."""
    notes = UsageNotes(RayUsageStore(keeper), router.facts.name, router.metrics)
    router.metrics.show(UsageTotals(counts_folder() / TOTALS))
    router.shutdown.wait_for_log(notes.num_waiting)
    notes.start()
    return notes
