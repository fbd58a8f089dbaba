"""The line in which requests wait for room.

IN LINE ──► AT THE FRONT ──► out      one at a time is at the front; it alone looks for room, the rest sleep
   ▲             │
   └─────────────┘ it found none: before it looks again, whoever goes first by then has the front

Who goes first is `router.fair_queue`'s to say. So a big request is not passed by small ones of the same tenant. Whoever could
not come to the front in time, at the pace at which the line moves, is refused at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import OverloadedError
from router.fair_queue import Entry, FairQueue, Standing

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
        self._limit = limit
        self._queue = FairQueue(ageing_s)
        self._places: dict[Entry, Place] = {}
        self._front: Place | None = None
        self._pace = Pace()

    def __len__(self) -> int:
        return len(self._places)

    def retry_after_s(self, standing: Standing) -> float:
        """When a newcomer would come to the front, from the pace at which the line moved lately: 1 to 60 s."""
        gap_s = 1.0 if self._pace.gap_s is None else self._pace.gap_s
        return min(max(1.0, self._queue.num_before(standing) * gap_s), _LONGEST_RETRY_S)

    @contextmanager
    def place(self, standing: Standing, cost: float, deadline: float, *, ahead: bool = False) -> Iterator[Place]:
        """A place in line while inside. `ahead` goes before all others that wait, also if the line is full (a resumed stream).

        `deadline` is the loop's time. Raises OverloadedError at once if the line is too long.
        """
        now = asyncio.get_running_loop().time()
        if not ahead:
            self._check_pace(standing, deadline - now)
            self._make_room(standing)
        entry = self._queue.add(None if ahead else standing, cost, now)
        place = self._places[entry] = Place(self, entry, deadline)
        try:
            yield place
        finally:
            self._leave(place)

    def step_back(self, place: Place) -> None:
        """Let `place` be at the front no longer, unless it is still the first."""
        if self._front is place:
            self._front = None
            place.called = asyncio.get_running_loop().create_future()
        self._call_first()

    def _leave(self, place: Place) -> None:
        if self._places.pop(place.entry, None) is None:
            return  # it had to make room
        now = asyncio.get_running_loop().time()
        if place.served:
            self._queue.serve(place.entry, now)
            self._pace.served(now, bool(self._places))
        else:
            self._queue.leave(place.entry)
        if self._front is place:
            self._front = None
        self._call_first()

    def _call_first(self) -> None:
        if self._front is None:
            entry = self._queue.first(asyncio.get_running_loop().time())
            if entry is not None:
                self._front = self._places[entry]
                if not self._front.called.done():
                    self._front.called.set_result(None)

    def _check_pace(self, standing: Standing, patience_s: float) -> None:
        gap_s = self._pace.gap_s
        if gap_s is not None and (wait_s := self._queue.num_before(standing) * gap_s) > patience_s:
            raise OverloadedError(
                f"as requests are served now this one would wait for {wait_s:.0f} s, longer than the {patience_s:.3g} s that "
                "it may; try again later",
                retry_after_s=self.retry_after_s(standing),
            )

    def _make_room(self, standing: Standing) -> None:
        """Raise OverloadedError if the line is full, here or in the request of a tenant that waits for more than its share."""
        if len(self._places) < self._limit:
            return
        leaving = self._queue.who_leaves_for(standing)
        full = OverloadedError(
            f"{len(self._places)} requests are waiting already; try again later", retry_after_s=self.retry_after_s(standing)
        )
        if leaving is None or self._places[leaving].called.done():
            raise full
        self._queue.leave(leaving)
        self._places.pop(leaving).called.set_exception(full)
