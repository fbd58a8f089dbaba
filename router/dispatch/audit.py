"""Ask all workers for their books, and name what leaks. Nothing is changed by it, and requests go on meanwhile.

    snapshot ──nothing found──► []
       └─something─► again, and again ──► what every one of them found

A single snapshot also sees what is just under way: a ticket that was granted and whose answer travels, a Release that does.
That is gone in the next one. A leak stays.
"""

from __future__ import annotations

import asyncio

from protocol.errors import TandemError
from protocol.messages import WorkerRef
from router.dispatch.links import WorkerLink
from router.dispatch.roster import Roster
from router.rules.leaks import Audited, Leak, find_leaks

_PATIENCE_S = 2.0
"""A worker's loop answers within milliseconds; one that takes this long serves nobody."""
_SNAPSHOTS = 3
_GAP_S = 0.5


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
