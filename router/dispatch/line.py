"""The line in which requests wait for room.

IN LINE ──► AT THE FRONT ──► out      one at a time is at the front; it alone looks for room, the rest sleep
   ▲             │
   └─────────────┘ it found none: before it looks again, whoever goes first by then has the front

Who goes first is `router.rules.fair_queue`'s to say. So a big request is not passed by small ones of the same tenant. Whoever
could not come to the front in time, at the pace at which the line moves, is refused at once. `LineRules` are this without tasks
and clock, for the simulator too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import OverloadedError
from router.rules.fair_queue import Entry, FairQueue, SchedulingClass

_MEMORY_S = 30.0
"""How far back the pace is measured: what was counts for 1/e after so long."""
_EVIDENCE = 4.0
"""So many must have been served lately before anybody is refused for the pace."""
_LONGEST_RETRY_S = 60.0


class Pace:
    """Seconds from one request served to the next, while others waited all along. `now` as in FairQueue."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_served = 0.0
        self._last: float | None = None

    @property
    def gap_s(self) -> float | None:
        """None before there is enough to go by."""
        return self._busy_s / self._num_served if self._num_served >= _EVIDENCE else None

    def served(self, now: float, others_wait: bool) -> None:
        if self._last is not None:
            passed_s = now - self._last
            fading = math.exp(-passed_s / _MEMORY_S)
            self._busy_s = self._busy_s * fading + passed_s
            self._num_served = self._num_served * fading + 1
        self._last = now if others_wait else None


class LineRules:
    """Who is in line, who is at the front and who is refused: pure, with every time given (`now`, as in FairQueue)."""

    def __init__(self, limit: int, ageing_s: float) -> None:
        self.front: Entry | None = None
        self._limit = limit
        self._queue = FairQueue(ageing_s)
        self._pace = Pace()

    def __len__(self) -> int:
        return len(self._queue)

    def num_of(self, tenant: str) -> int:
        """As in FairQueue."""
        return self._queue.num_of(tenant)

    def enter(
        self, scheduling_class: SchedulingClass | None, cost: float, patience_s: float, now: float
    ) -> tuple[Entry, Entry | None]:
        """The newcomer's entry, and another's that has to make room for it. None is a resumed stream, which is never refused.

        Raises OverloadedError if the line is too long, or too slow for `patience_s`.
        """
        leaving = None
        if scheduling_class is not None:
            self._check_pace(scheduling_class, patience_s)
            leaving = self._make_room(scheduling_class)
        return self._queue.add(scheduling_class, cost, now), leaving

    def call(self, now: float) -> Entry | None:
        """Who comes to the front just now; None if somebody is there, or nobody waits."""
        if self.front is not None:
            return None
        self.front = self._queue.first(now)
        return self.front

    def step_back(self, entry: Entry) -> bool:
        """It found no room; by the next `call` somebody else may be first. False if it was not at the front."""
        if self.front is not entry:
            return False
        self.front = None
        return True

    def leave(self, entry: Entry, now: float, *, served: bool) -> None:
        """It found room, or gives up."""
        if served:
            self._queue.serve(entry, now)
            self._pace.served(now, len(self._queue) > 0)
        else:
            self._queue.leave(entry)
        self.step_back(entry)

    def retry_after_s(self, scheduling_class: SchedulingClass) -> float:
        """When a newcomer would come to the front, from the pace at which the line moved lately: 1 to 60 s."""
        gap_s = 1.0 if self._pace.gap_s is None else self._pace.gap_s
        return min(max(1.0, self._queue.num_before(scheduling_class) * gap_s), _LONGEST_RETRY_S)

    def full_error(self, scheduling_class: SchedulingClass) -> OverloadedError:
        return OverloadedError(
            f"{len(self)} requests are waiting already; try again later", retry_after_s=self.retry_after_s(scheduling_class)
        )

    def _check_pace(self, scheduling_class: SchedulingClass, patience_s: float) -> None:
        gap_s = self._pace.gap_s
        if gap_s is not None and (wait_s := self._queue.num_before(scheduling_class) * gap_s) > patience_s:
            raise OverloadedError(
                f"as requests are served now this one would wait for {wait_s:.0f} s, longer than the {patience_s:.3g} s that "
                "it may; try again later",
                retry_after_s=self.retry_after_s(scheduling_class),
            )

    def _make_room(self, scheduling_class: SchedulingClass) -> Entry | None:
        """Raise OverloadedError if the line is full and no tenant waits for more than its share, by whose request it could go.
        Who is at the front stays."""
        if len(self) < self._limit:
            return None
        leaving = self._queue.who_leaves_for(scheduling_class)
        if leaving is None or leaving is self.front:
            raise self.full_error(scheduling_class)
        self._queue.leave(leaving)
        return leaving


class Place:
    """One request's place; made and left by `WaitingLine.place`."""

    def __init__(self, line: WaitingLine, entry: Entry, deadline: float) -> None:
        self.served = False
        """Set it on finding room."""
        self.entry = entry
        self.called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = line
        self._deadline = deadline

    async def front(self) -> None:
        """Be at the front until the next call, or until the place is left.

        Raises TimeoutError at the deadline, OverloadedError if it had to make room for another tenant's request.
        """
        self._line.step_back(self)
        async with asyncio.timeout_at(self._deadline):
            await self.called


class WaitingLine:
    """At most `limit` requests, resumed streams apart. What waits gains a level of priority every `ageing_s`."""

    def __init__(self, limit: int, ageing_s: float) -> None:
        self._rules = LineRules(limit, ageing_s)
        self._places: dict[Entry, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def num_of(self, tenant: str) -> int:
        """As in FairQueue."""
        return self._rules.num_of(tenant)

    def retry_after_s(self, scheduling_class: SchedulingClass) -> float:
        """As in LineRules."""
        return self._rules.retry_after_s(scheduling_class)

    @contextmanager
    def place(self, scheduling_class: SchedulingClass, cost: float, deadline: float, *, ahead: bool = False) -> Iterator[Place]:
        """A place in line while inside. `ahead` goes before all others that wait, also if the line is full (a resumed stream).

        `deadline` is the loop's time. Raises OverloadedError at once if the line is too long.
        """
        now = asyncio.get_running_loop().time()
        entry, leaving = self._rules.enter(None if ahead else scheduling_class, cost, deadline - now, now)
        if leaving is not None:
            called = self._places.pop(leaving).called
            if not called.done():  # it is giving up itself
                called.set_exception(self._rules.full_error(scheduling_class))
        place = self._places[entry] = Place(self, entry, deadline)
        try:
            yield place
        finally:
            self._leave(place)

    def step_back(self, place: Place) -> None:
        """Let `place` be at the front no longer, unless it is still the first."""
        if self._rules.step_back(place.entry):
            place.called = asyncio.get_running_loop().create_future()
        self._call_first()

    def _leave(self, place: Place) -> None:
        if self._places.pop(place.entry, None) is None:
            return  # it had to make room
        self._rules.leave(place.entry, asyncio.get_running_loop().time(), served=place.served)
        self._call_first()

    def _call_first(self) -> None:
        entry = self._rules.call(asyncio.get_running_loop().time())
        if entry is not None:
            called = self._places[entry].called
            if not called.done():
                called.set_result(None)
