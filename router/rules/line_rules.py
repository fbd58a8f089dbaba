"""Who is in line, who is at the front, and who is refused. Pure: every time is given; `router.dispatch.line` has the tasks.

    enter ──► IN LINE ──call──► AT THE FRONT ──leave──► out       one request at a time is at the front
      │          ▲                   │
      │          └────step_back──────┘ it found no room: before it looks again, whoever goes first by then is called
      │          └────step_aside─────┘ there is none for its class: meanwhile others are called
      │          └─────let_pass──────┘ it is long, and waits for another long one: meanwhile who is behind it is called
      └─► refused: the line is too long, or too slow for the newcomer

Times (`now`) are in seconds, on any clock that never goes back.
"""

from __future__ import annotations

import math

from protocol.errors import OverloadedError
from router.rules.fair_queue import Entry, FairQueue, RequestProgress, SchedulingClass

LEVELS_PER_QUEUE_TIME = 40
"""Levels of priority that a request gains while it waits for `limits.queue_s`: one every 1.5 s by default."""
_MEMORY_S = 30.0
"""Time constant of the pace: what was measured this long ago counts for 1/e."""
_EVIDENCE = 4.0
"""Number of requests that must have been served lately before anybody is refused for the pace."""
_LONGEST_RETRY_S = 60.0
_MOST_PASSED = 8
"""Long requests that let others pass at a time."""


class Pace:
    """Seconds from one served request to the next, measured only while others wait all along."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_served = 0.0
        self._measured_at = 0.0
        self._others_wait = False
        """Since `_measured_at`."""

    def gap_s(self, now: float) -> float | None:
        """Mean gap in seconds; None where too few requests were served lately.

        While others wait, what was measured does not age: a line that stands still is as slow as ever.
        """
        num_served = self._num_served if self._others_wait else self._num_served * self._fading(now)
        return self._busy_s / self._num_served if num_served >= _EVIDENCE else None

    def served(self, now: float, others_wait: bool) -> None:
        """Note that a request was served. The gap to the next one counts only if `others_wait`."""
        fading, passed_s = self._fading(now), now - self._measured_at
        self._busy_s = self._busy_s * fading + (passed_s if self._others_wait else 0.0)
        self._num_served = self._num_served * fading + self._others_wait
        self._measured_at, self._others_wait = now, others_wait

    def nobody_waits(self) -> None:
        """Note that those who waited have gone: the time until the next one is served is no gap."""
        self._others_wait = False

    def _fading(self, now: float) -> float:
        return math.exp((self._measured_at - now) / _MEMORY_S)


class LineRules:
    """The line of one router: at most `limit` requests, retries and further choices of requests that have begun apart.

    No more choices of one request wait than may be at the workers (`router.request.choices`). A request that waits gains a
    level of priority every `ageing_s` seconds.
    """

    def __init__(self, limit: int, ageing_s: float) -> None:
        self.front: Entry | None = None
        self._aside: set[Entry] = set()
        """Requests for whose kinds there is no room: nobody of these kinds is called."""
        self._passed: set[Entry] = set()
        """Long requests that wait for others: those behind them are called, whatever their class."""
        self._limit = limit
        self._queue = FairQueue(ageing_s)
        self._pace = Pace()

    def __len__(self) -> int:
        return len(self._queue)

    def num_of(self, tenant: str) -> int:
        """Number of requests that a tenant has in line, retries apart."""
        return self._queue.num_of(tenant)

    def enter(
        self,
        scheduling_class: SchedulingClass,
        cost: float,
        patience_s: float,
        now: float,
        *,
        retry: bool = False,
        progress: RequestProgress | None = None,
    ) -> tuple[Entry, Entry | None]:
        """Put a newcomer in line. Returns its entry, and that of another request that has to leave for it, or None.

        A `retry`, after a failed attempt, is never refused, nor is a further choice of a request that has begun by its
        `progress`. Such a choice never leaves for others. `cost` is in tokens.

        Raises OverloadedError if the line is too long, or so slow that the newcomer would wait for more than `patience_s`.
        """
        leaving = None
        if not retry and not (progress is not None and progress.begun):
            self._check_pace(scheduling_class, patience_s, now)
            leaving = self._make_room(scheduling_class, now)
        return self._queue.add(scheduling_class, cost, now, retry=retry, progress=progress), leaving

    def call(self, now: float) -> Entry | None:
        """Bring the request that goes first to the front. None if the front is taken, or nobody waits."""
        if self.front is not None:
            return None
        self.front = self._first(now)
        return self.front

    def outranks_front(self, entry: Entry, now: float) -> bool:
        """Tell whether a request would go before the one that is at the front, which looks for room or waits for some."""
        return self.front is not None and self._first(now) is entry

    def step_back(self, entry: Entry) -> bool:
        """Free the front, for the request there found no room. False if this one was not at the front.

        It may be called again, and its kind.
        """
        self._aside.discard(entry)
        self._passed.discard(entry)
        if self.front is not entry:
            return False
        self.front = None
        return True

    def step_aside(self, entry: Entry) -> None:
        """Free the front, for there is no room for the kind of the request there. It is not called until one steps back."""
        self.step_back(entry)
        self._aside.add(entry)

    def let_pass(self, entry: Entry) -> None:
        """Free the front for those behind the request there, which is not called until it steps back.

        If enough are passed already, for each of them looks for room at every change, only those of other classes go.
        """
        if len(self._passed) >= _MOST_PASSED:
            self.step_aside(entry)
            return
        self.step_back(entry)
        self._passed.add(entry)

    def leave(self, entry: Entry, now: float, *, served: bool) -> None:
        """Take a request out of the line: it found room (`served`), or gives up."""
        if served:
            self._queue.serve(entry, now)
            self._pace.served(now, len(self._queue) > 0)
        else:
            self._queue.leave(entry)
            if not len(self._queue):
                self._pace.nobody_waits()
        self.step_back(entry)

    def retry_after_s(self, scheduling_class: SchedulingClass, now: float) -> float:
        """Seconds until a newcomer would come to the front at the recent pace, between 1 and 60."""
        gap_s = self._pace.gap_s(now)
        return min(max(1.0, self._queue.num_before(scheduling_class) * (1.0 if gap_s is None else gap_s)), _LONGEST_RETRY_S)

    def full_error(self, scheduling_class: SchedulingClass, now: float) -> OverloadedError:
        """The refusal of a request for which the line is too long."""
        retry_after_s = self.retry_after_s(scheduling_class, now)
        return OverloadedError(f"{len(self)} requests are waiting already; try again later", retry_after_s=retry_after_s)

    def _first(self, now: float) -> Entry | None:
        return self._queue.first(now, {entry.kind for entry in self._aside}, self._passed)

    def _check_pace(self, scheduling_class: SchedulingClass, patience_s: float, now: float) -> None:
        gap_s = self._pace.gap_s(now)
        if gap_s is not None and (wait_s := self._queue.num_before(scheduling_class) * gap_s) > patience_s:
            raise OverloadedError(
                f"as requests are served now this one would wait for {wait_s:.0f} s, longer than the {patience_s:.3g} s that "
                "it may; try again later",
                retry_after_s=self.retry_after_s(scheduling_class, now),
            )

    def _make_room(self, scheduling_class: SchedulingClass, now: float) -> Entry | None:
        """In a full line, take out the request that has to leave for the newcomer: one of the tenant that waits for most.

        None if the line is not full, retries and choices of begun requests apart. Raises OverloadedError if no tenant waits for
        more than the newcomer's. The request at the front stays.
        """
        if len(self._queue) < self._limit or self._queue.num_newcomers < self._limit:  # the latter looks at each request
            return None
        leaving = self._queue.who_leaves_for(scheduling_class)
        if leaving is None or leaving is self.front:
            raise self.full_error(scheduling_class, now)
        self._queue.leave(leaving)
        self._aside.discard(leaving)
        self._passed.discard(leaving)
        return leaving
