"""What is asked of all workers at once: their books, to name what leaks, and to erase cached KV. Requests go on meanwhile.

An audit is made when an operator asks for one, and regularly, for the metrics.

    snapshot ──nothing found──► []
       └─something─► again, and again ──► what every one of them found

A single snapshot also sees what is just under way: a ticket that was granted and whose answer travels, a Release that does.
That is gone in the next one. A leak stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from protocol.cache.reset import CacheErased
from protocol.errors import TandemError, UnavailableError
from protocol.messages.workers import WorkerRef
from router.dispatch.links import WorkerLink
from router.dispatch.roster import Roster
from router.rules.leaks import Audited, Leak, find_leaks

log = logging.getLogger(__name__)

REGULAR_S = 60.0
"""Seconds from one regular audit to the next, on average."""
_PATIENCE_S = 2.0
"""A worker's loop answers within milliseconds; one that takes this long serves nobody."""
_SNAPSHOTS = 3
_GAP_S = 0.5
_ERASE_S = 60.0
"""Erasing 100,000 files takes two seconds."""


async def audit(roster: Roster, lease_s: float) -> list[Leak]:
    """Return what leaks in the cluster. `lease_s` is the lease of tickets and routers, in seconds.

    It takes a few milliseconds if nothing leaks, otherwise a second and the time that the workers take to answer.
    """
    leaks = await _snapshot(roster, lease_s)
    for _ in range(_SNAPSHOTS - 1):
        if not leaks:
            break
        await asyncio.sleep(_GAP_S)
        suspected = {leak.key for leak in leaks}
        leaks = [leak for leak in await _snapshot(roster, lease_s) if leak.key in suspected]
    return leaks


class RegularAudits:
    """Audits the cluster again and again, and tells `on_result` how many leaks there are."""

    def __init__(self, roster: Roster, lease_s: float, on_result: Callable[[int], None]) -> None:
        self._roster = roster
        self._lease_s = lease_s
        self._on_result = on_result
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. The first audit is made when workers have had time to come."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Make no more of them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REGULAR_S * random.uniform(0.5, 1.5))  # not all routers at once
            try:
                leaks = await audit(self._roster, self._lease_s)
            except Exception:
                log.exception("an audit failed")
                continue
            for leak in leaks:
                log.error("a leak at %s epoch %d: %s", leak.worker_id, leak.epoch, leak.message)
            self._on_result(len(leaks))


async def _snapshot(roster: Roster, lease_s: float) -> list[Leak]:
    workers = await asyncio.gather(*(_ask(ref, link) for ref, link in roster.members()))
    return find_leaks(workers, lease_s, _PATIENCE_S)


async def _ask(ref: WorkerRef, link: WorkerLink | None) -> Audited:
    if link is None:
        return Audited(ref, None)
    try:
        books = await link.calls.audit(_PATIENCE_S)
    except TandemError:
        return Audited(ref, None)
    return Audited(ref, books, link.streams.claims)


async def reset_caches(roster: Roster, tenant: str | None) -> list[dict[str, Any]]:
    """Erase a tenant's cached KV, or everybody's (None), from every worker's pool and node. Returns what each has erased.

    Raises UnavailableError that names the workers where some may be left.
    """
    members = roster.members()
    outcomes = await asyncio.gather(*(_erase(link, tenant) for _, link in members))
    failed = [ref.worker_id for (ref, _), outcome in zip(members, outcomes, strict=True) if outcome is None]
    if failed:
        raise UnavailableError(f"{', '.join(failed)} did not erase everything: ask again", retry_after_s=1.0)
    erased = zip(members, outcomes, strict=True)
    return [_row(ref, outcome) for (ref, _), outcome in erased if outcome is not None]


async def _erase(link: WorkerLink | None, tenant: str | None) -> CacheErased | None:
    if link is None:
        return None
    try:
        return await link.calls.reset_cache(tenant, _ERASE_S)
    except TandemError:
        return None


def _row(ref: WorkerRef, erased: CacheErased) -> dict[str, Any]:
    return {"worker_id": ref.worker_id, "pool_blocks": erased.pool_blocks, "tier_blocks": erased.tier_blocks}
