"""Who goes next: priority with ageing between levels, weighted fairness between the tenants of a level, order within a tenant.

Resumed streams go before everybody. Then the level with the lowest number, minus one for every `ageing_s` that it has waited
since it was last served: a level that waits overtakes any other in the end, and is then served once before it ages anew. In a
level the tenant with the lowest start tag: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), where a tenant's tag
grows by cost / weight with each request served, and one that comes back starts where the level is by now. So while two
tenants wait, what they got, each divided by its weight, never differs by more than one request of each.

Pure: no clock, no event loop. What is not said here by an argument is decided by the order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulingClass:
    """What decides a request's place in the queue: its tenant, the tenant's weight, and its level."""

    tenant: str
    weight: float = 1.0
    level: int = 0
    """Lower goes first."""


ANYBODY = SchedulingClass("")


@dataclass(eq=False)
class Entry:
    """One request in the queue; `scheduling_class` None for a resumed stream. `cost` is in any unit, the same for all."""

    scheduling_class: SchedulingClass | None
    cost: float
    number: int


@dataclass
class _Tenant:
    start: float
    """Start tag of its first request."""
    waiting: deque[Entry] = field(default_factory=deque)


@dataclass
class _Level:
    since: float
    """When it was served last, or began to wait."""
    virtual: float = 0.0
    """Start tag of the request served last."""
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    """Also those that wait for nothing but are ahead of their share."""

    @property
    def num_waiting(self) -> int:
        return sum(len(tenant.waiting) for tenant in self.tenants.values())


class FairQueue:
    """All times in seconds on any clock that never goes back."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._resumed: deque[Entry] = deque()
        self._levels: dict[int, _Level] = {}
        """Those in which somebody waits."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._resumed) + sum(level.num_waiting for level in self._levels.values())

    def add(self, scheduling_class: SchedulingClass | None, cost: float, now: float) -> Entry:
        """Put a request behind those of the same tenant and level; None: a resumed stream, behind the others of these."""
        self._num_added += 1
        entry = Entry(scheduling_class, cost, self._num_added)
        if scheduling_class is None:
            self._resumed.append(entry)
        else:
            level = self._levels.setdefault(scheduling_class.level, _Level(now))
            tenant = level.tenants.setdefault(scheduling_class.tenant, _Tenant(level.virtual))
            if not tenant.waiting:
                tenant.start = max(tenant.start, level.virtual)
            tenant.waiting.append(entry)
        return entry

    def num_of(self, tenant: str) -> int:
        """Its requests, resumed streams apart."""
        levels = self._levels.values()
        return sum(len(level.tenants[tenant].waiting) for level in levels if tenant in level.tenants)

    def first(self, now: float) -> Entry | None:
        """Who goes next; stays in the queue."""
        if self._resumed:
            return self._resumed[0]
        if not self._levels:
            return None
        number = min(self._levels, key=lambda number: (number - (now - self._levels[number].since) / self._ageing_s, number))
        waiting = (tenant for tenant in self._levels[number].tenants.values() if tenant.waiting)
        return min(waiting, key=lambda tenant: (tenant.start, tenant.waiting[0].number)).waiting[0]

    def serve(self, entry: Entry, now: float) -> None:
        """It got what it waited for: it leaves, and its tenant pays."""
        if entry.scheduling_class is not None:
            level = self._levels[entry.scheduling_class.level]
            tenant = level.tenants[entry.scheduling_class.tenant]
            level.since = now
            level.virtual = max(level.virtual, tenant.start)
            tenant.start += entry.cost / entry.scheduling_class.weight
        self.leave(entry)

    def leave(self, entry: Entry) -> None:
        """It goes without having been served."""
        if entry.scheduling_class is None:
            self._resumed.remove(entry)
            return
        number = entry.scheduling_class.level
        level = self._levels[number]
        level.tenants[entry.scheduling_class.tenant].waiting.remove(entry)
        for name, tenant in list(level.tenants.items()):
            if not tenant.waiting and tenant.start <= level.virtual:
                del level.tenants[name]
        if not level.num_waiting:
            del self._levels[number]

    def who_leaves_for(self, scheduling_class: SchedulingClass) -> Entry | None:
        """Of a full queue: the newest request of the tenant that waits for most by its weight, at its last level. None if
        that is the newcomer of this class itself."""
        crowd: dict[str, float] = {}
        newest: dict[str, Entry] = {}
        for entry in self._by_level():
            assert entry.scheduling_class is not None
            tenant = entry.scheduling_class.tenant
            crowd[tenant] = crowd.get(tenant, 0.0) + 1 / entry.scheduling_class.weight
            newest[tenant] = entry
        own = crowd.get(scheduling_class.tenant, 0.0) + 1 / scheduling_class.weight
        most = max(crowd, key=lambda tenant: crowd[tenant], default=None)
        return newest[most] if most is not None and crowd[most] > own else None

    def num_before(self, scheduling_class: SchedulingClass) -> float:
        """About how many go before a newcomer of this class: all of better levels, and in its own level as many of each
        tenant as are due, by the weights, until it is its turn. Ageing and costs are left out."""
        found = float(len(self._resumed))
        own = self._levels.get(scheduling_class.level)
        behind = (
            own.tenants[scheduling_class.tenant].waiting if own is not None and scheduling_class.tenant in own.tenants else ()
        )
        for number, level in self._levels.items():
            if number < scheduling_class.level:
                found += level.num_waiting
            elif number == scheduling_class.level:
                for name, tenant in level.tenants.items():
                    if name == scheduling_class.tenant:
                        found += len(tenant.waiting)
                    elif tenant.waiting:
                        assert tenant.waiting[0].scheduling_class is not None
                        share = tenant.waiting[0].scheduling_class.weight / scheduling_class.weight
                        found += min(len(tenant.waiting), (len(behind) + 1) * share)
        return found

    def _by_level(self) -> Iterator[Entry]:
        """Everyone but resumed streams; the last levels last, within a tenant in order."""
        for _, level in sorted(self._levels.items()):
            for tenant in level.tenants.values():
                yield from tenant.waiting
