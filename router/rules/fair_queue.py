"""Who goes next: priority with ageing between levels, weighted fairness between the tenants of a level, order within a tenant.

Retries, of requests whose attempt has failed, go before all other requests. Then goes the level with the lowest number, minus
one for every `ageing_s` that it has waited since it was last served. So a level that waits overtakes any other in the end, and
is then served once before it ages anew. Within a level goes the tenant with the lowest start tag. This is start-time fair
queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a tenant's tag grows by cost / weight with each request served, and a tenant that
comes back starts where the level is by now. So while two tenants wait, their service, each divided by its weight, never differs
by more than one request of each.

Pure: no clock, no event loop. The order of arrival decides what no argument does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulingClass:
    """What decides about a request's place: its tenant, the tenant's weight, and the level of priority."""

    tenant: str
    weight: float = 1.0
    level: int = 0
    """A lower level goes first."""


ANYBODY = SchedulingClass("")
Kind = tuple[SchedulingClass, bool]
"""A class, and whether it is that class's retries or its other requests."""


@dataclass
class RequestProgress:
    """How far a request is. Its choices share it, and so do their entries in line."""

    begun: bool = False
    """One of its choices has a token, so refusing another choice would end an answer that its client has a part of."""


@dataclass(eq=False)
class Entry:
    """One request in the queue. `cost` has one unit for all requests."""

    scheduling_class: SchedulingClass
    cost: float
    number: int
    retry: bool
    """Whether the request goes before all others, because an attempt of it has failed."""
    progress: RequestProgress

    @property
    def kind(self) -> Kind:
        """Where the request finds no room, others of its kind find none either."""
        return self.scheduling_class, self.retry


@dataclass
class _Tenant:
    start: float
    """Start tag of the tenant's first waiting request."""
    waiting: deque[Entry] = field(default_factory=deque)


@dataclass
class _Level:
    since: float
    """When the level was served last, or began to wait."""
    virtual: float = 0.0
    """Start tag of the request that was served last."""
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    """Tenants that wait, and tenants that have no request here but are ahead of their share."""

    @property
    def num_waiting(self) -> int:
        return sum(len(tenant.waiting) for tenant in self.tenants.values())


def _firsts(level: _Level, aside: Container[Kind], passed: Container[Entry]) -> list[tuple[float, int, Entry]]:
    """Of each tenant of a level the first request that is not passed over, by its place: start tag and number."""
    found = []
    for tenant in level.tenants.values():
        entry = next((each for each in tenant.waiting if each not in passed), None)
        if entry is not None and entry.kind not in aside:
            found.append((tenant.start, entry.number, entry))
    return found


class FairQueue:
    """Requests in order of service. Times are in seconds, on any clock that never goes back."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._retries: deque[Entry] = deque()
        self._levels: dict[int, _Level] = {}
        """Levels in which some request waits, by number."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._retries) + sum(level.num_waiting for level in self._levels.values())

    @property
    def num_newcomers(self) -> int:
        """Number of requests that wait, retries and further choices of requests that have begun apart."""
        return sum(1 for _ in self._newcomers())

    def add(
        self,
        scheduling_class: SchedulingClass,
        cost: float,
        now: float,
        *,
        retry: bool = False,
        progress: RequestProgress | None = None,
    ) -> Entry:
        """Put a request behind those of its tenant and level, or a retry behind all retries.

        `progress` is that of the request of which this is a choice.
        """
        self._num_added += 1
        entry = Entry(scheduling_class, cost, self._num_added, retry, progress or RequestProgress())
        if retry:
            self._retries.append(entry)
        else:
            level = self._levels.setdefault(scheduling_class.level, _Level(now))
            tenant = level.tenants.setdefault(scheduling_class.tenant, _Tenant(level.virtual))
            if not tenant.waiting:
                tenant.start = max(tenant.start, level.virtual)
            tenant.waiting.append(entry)
        return entry

    def num_of(self, tenant: str) -> int:
        """Number of a tenant's requests that wait, retries apart."""
        levels = self._levels.values()
        return sum(len(level.tenants[tenant].waiting) for level in levels if tenant in level.tenants)

    def first(self, now: float, aside: Container[Kind] = (), passed: Container[Entry] = ()) -> Entry | None:
        """The request that goes next, or None. It stays in the queue.

        Requests of a kind that stands `aside` are passed over, and those that are `passed`.
        """
        retry = next((each for each in self._retries if each not in passed and each.kind not in aside), None)
        if retry is not None:
            return retry
        waiting = {number: _firsts(level, aside, passed) for number, level in self._levels.items()}
        numbers = [number for number, firsts in waiting.items() if firsts]
        if not numbers:
            return None
        number = min(numbers, key=lambda number: (number - (now - self._levels[number].since) / self._ageing_s, number))
        return min(waiting[number], key=lambda first: first[:2])[2]

    def serve(self, entry: Entry, now: float) -> None:
        """Take out a request that was served: its tenant pays the cost."""
        if not entry.retry:
            level = self._levels[entry.scheduling_class.level]
            tenant = level.tenants[entry.scheduling_class.tenant]
            level.since = now
            level.virtual = max(level.virtual, tenant.start)
            tenant.start += entry.cost / entry.scheduling_class.weight
        self.leave(entry)

    def leave(self, entry: Entry) -> None:
        """Take out a request that was not served: its tenant pays nothing."""
        if entry.retry:
            self._retries.remove(entry)
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
        """The request that should leave a full queue for a newcomer, or None if the newcomer should.

        It is the newest request, at its last level, of the tenant that has the most requests in the queue by its weight. No
        choice leaves whose request has begun, and none counts.
        """
        crowd: dict[str, float] = {}
        newest: dict[str, Entry] = {}
        for entry in self._newcomers():
            tenant = entry.scheduling_class.tenant
            crowd[tenant] = crowd.get(tenant, 0.0) + 1 / entry.scheduling_class.weight
            newest[tenant] = entry
        own = crowd.get(scheduling_class.tenant, 0.0) + 1 / scheduling_class.weight
        most = max(crowd, key=lambda tenant: crowd[tenant], default=None)
        return newest[most] if most is not None and crowd[most] > own else None

    def num_before(self, scheduling_class: SchedulingClass) -> float:
        """Estimate how many requests go before a newcomer.

        These are all requests of better levels and, in its own level, as many of each tenant as are due by the weights before
        its turn comes. Ageing and costs are left out.
        """
        found = float(len(self._retries))
        own = self._levels.get(scheduling_class.level)
        mine = None if own is None else own.tenants.get(scheduling_class.tenant)
        behind = () if mine is None else mine.waiting
        for number, level in self._levels.items():
            if number < scheduling_class.level:
                found += level.num_waiting
            elif number == scheduling_class.level:
                for name, tenant in level.tenants.items():
                    if name == scheduling_class.tenant:
                        found += len(tenant.waiting)
                    elif tenant.waiting:
                        share = tenant.waiting[0].scheduling_class.weight / scheduling_class.weight
                        found += min(len(tenant.waiting), (len(behind) + 1) * share)
        return found

    def _newcomers(self) -> Iterator[Entry]:
        """All requests but retries and choices of requests that have begun.

        The best level comes first, and each tenant's are in order of arrival.
        """
        for _, level in sorted(self._levels.items()):
            for tenant in level.tenants.values():
                yield from (entry for entry in tenant.waiting if not entry.progress.begun)
