"""Virtual time: what is to happen, in order. Equal times go in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Seconds from the beginning of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        """Call `event` then; not in the past."""
        assert time >= self.now, "time does not go back"
        self.num_events += 1
        heappush(self._events, (time, self.num_events, event, args))

    def after(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, event, *args)

    def run(self) -> None:
        """Until nothing is left to happen."""
        events = self._events
        while events:
            self.now, _, event, args = heappop(events)
            event(*args)
