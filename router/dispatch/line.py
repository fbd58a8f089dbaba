"""The line in which requests wait for room.

IN LINE ──► AT THE FRONT ──► out      one at a time is at the front; it alone looks for room, the rest sleep
   ▲             │
   └─────────────┘ it found none: before it looks again, whoever goes first by then has the front

`router.rules.line_rules` decides who goes first and who is refused; here are the tasks that wait, and the clock. A big request
is not passed by small ones of the same tenant, unless it is so long that it waits for another long prompt to be computed: short
ones are computed beside that. A request that could not come to the front in time, at the pace at which the line moves, is
refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router.rules.fair_queue import Entry, RequestProgress, SchedulingClass
from router.rules.line_rules import LineRules


class Place:
    """One request's place in line; `WaitingLine.place` makes and leaves it."""

    def __init__(self, line: WaitingLine, entry: Entry, deadline: float, *, outranks_front: bool) -> None:
        self.served = False
        """Whoever holds the place sets this when it has found room."""
        self.outranks_front = outranks_front
        """When it entered, another was at the front that it would go before."""
        self.entry = entry
        self.called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = deadline
        """Until then it waits, on the loop's clock. Whoever holds the place may put it off."""
        self._line = line

    async def front(self) -> None:
        """Wait for the front, and stay there until the next call of this, or until the place is left.

        Raises TimeoutError at the deadline, OverloadedError if it had to make room for another tenant's request.
        """
        self._line.step_back(self)
        async with asyncio.timeout_at(self.deadline):
            await asyncio.shield(self.called)  # it may come back for it

    def let_pass(self) -> None:
        """Let those behind this request look for room, until the next call of `front`."""
        self._line.let_pass(self)

    def step_aside(self) -> None:
        """Let requests of other classes look for room, until the next call of `front`."""
        self._line.step_aside(self)


class WaitingLine:
    """The requests of one router that wait for room: at most `limit`, retries and choices of requests that have begun apart.

    A request that waits gains a level of priority every `ageing_s` seconds.
    """

    def __init__(self, limit: int, ageing_s: float) -> None:
        self._rules = LineRules(limit, ageing_s)
        self._places: dict[Entry, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def num_of(self, tenant: str) -> int:
        """Number of requests that a tenant has in line, retries apart."""
        return self._rules.num_of(tenant)

    def retry_after_s(self, scheduling_class: SchedulingClass) -> float:
        """Seconds until a newcomer would come to the front at the recent pace, between 1 and 60."""
        return self._rules.retry_after_s(scheduling_class, asyncio.get_running_loop().time())

    @contextmanager
    def place(
        self,
        scheduling_class: SchedulingClass,
        cost: float,
        deadline: float,
        *,
        ahead: bool = False,
        progress: RequestProgress | None = None,
    ) -> Iterator[Place]:
        """Hold a place in line while inside. `deadline` is the loop's time, `cost` is in tokens.

        A request whose attempt has failed enters `ahead`: before all others that wait, also into a full line. A further choice
        of a request that has begun, by its `progress`, enters a full line too, but waits its turn. Raises OverloadedError at
        once if the line is too long, or too slow for the deadline.
        """
        now = asyncio.get_running_loop().time()
        entry, leaving = self._rules.enter(scheduling_class, cost, deadline - now, now, retry=ahead, progress=progress)
        if leaving is not None:
            self._places.pop(leaving).called.set_exception(self._rules.full_error(scheduling_class, now))
        place = Place(self, entry, deadline, outranks_front=self._rules.outranks_front(entry, now))
        self._places[entry] = place
        try:
            yield place
        finally:
            self._leave(place)

    def step_back(self, place: Place) -> None:
        """Take `place` from the front, and call whoever goes first now, which may be `place` again."""
        if self._rules.step_back(place.entry):
            place.called = asyncio.get_running_loop().create_future()
        self._call_first()

    def step_aside(self, place: Place) -> None:
        """Take `place` from the front, and call whoever goes first of the other classes."""
        self._rules.step_aside(place.entry)
        place.called = asyncio.get_running_loop().create_future()
        self._call_first()

    def let_pass(self, place: Place) -> None:
        """Take `place` from the front, and call whoever goes first of the others: of other classes if enough are passed."""
        self._rules.let_pass(place.entry)
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
