"""Virtual time: events in the order of their times. Events of equal times go in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """The time of a simulation, in seconds from its beginning, and the events that are still to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        """Call `event` with these arguments at this time, which must not be in the past."""
        assert time >= self.now, "time does not go back"
        self.num_events += 1
        heappush(self._events, (time, self.num_events, event, args))

    def after(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        """Call `event` with these arguments when this much time has passed."""
        self.at(self.now + delay_s, event, *args)

    def run(self) -> None:
        """Let time pass until no event is left."""
        events = self._events
        while events:
            self.now, _, event, args = heappop(events)
            event(*args)
