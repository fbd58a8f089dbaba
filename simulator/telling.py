"""What simulated workers tell: their load, what their caches gain and lose, and how busy those of a role are.

Loads and caches are told to routers as real workers do it (`protocol.endpoint`, `engine.memory.cache_teller`): when something
changes, but with a pause in between. How busy a role is, the workers of the other one want to know: where they share cores,
their steps are the slower for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from protocol.cache.keys import shortened
from protocol.cache.news import MOST_KEYS, NEWS_GAP_S, CacheNews
from protocol.endpoint import REPORT_GAP_S
from protocol.messages.load import LoadReport
from simulator.clock import Clock

EPOCH = 1
"""Epoch of all simulated workers: none of them dies."""
_MEMORY_S = 1.0
"""Time constant of busyness: what was measured this long ago counts for 1/e."""


class Reporter:
    """Makes a report with `report` whenever one is due, and calls `deliver` with it.

    Every `beat_s` seconds in which something runs, `beat` gets a report, too, of which only the pace of the steps is news. None
    if nobody asks for that.
    """

    def __init__(
        self,
        clock: Clock,
        report: Callable[[], LoadReport],
        deliver: Callable[[LoadReport], None],
        beat: Callable[[LoadReport], None] | None,
        beat_s: float,
    ) -> None:
        self._clock = clock
        self._report = report
        self._deliver = deliver
        self._beat = beat
        self._beat_s = beat_s
        self._beats = False
        self._due = False
        self._next_at = 0.0

    def changed(self) -> None:
        """Note that the load has changed: a report is due as soon as the last one is 50 ms old."""
        if not self._due:
            self._due = True
            self._clock.at(max(self._clock.now, self._next_at), self._send)

    def _send(self) -> None:
        self._due = False
        self._next_at = self._clock.now + REPORT_GAP_S
        report = self._report()
        self._deliver(report)
        if self._beat is not None and report.running and not self._beats:
            self._beats = True
            self._clock.after(self._beat_s, self._send_beat, self._beat)

    def _send_beat(self, beat: Callable[[LoadReport], None]) -> None:
        report = self._report()
        self._beats = report.running > 0
        if self._beats:
            beat(report)
            self._clock.after(self._beat_s, self._send_beat, beat)


class News:
    """Tells which blocks one worker's prefix cache gains and loses, which goes to `note`. `deliver` gets the messages."""

    def __init__(self, worker_id: str, clock: Clock, deliver: Callable[[CacheNews], None]) -> None:
        self._worker_id = worker_id
        self._clock = clock
        self._deliver = deliver
        self._changes: dict[bytes, bool] = {}
        self._number = 0
        self._due = False
        self._next_at = 0.0

    def start(self) -> None:
        """Tell that the cache is empty."""
        self._deliver(CacheNews(self._worker_id, EPOCH, self._number, begins=True, left=0, gained=b"", lost=b""))

    def note(self, key: bytes, cached: bool) -> None:
        """Note that this key is cached from now on, or no longer."""
        if self._changes.pop(key, cached) != cached:
            return  # and so it is again what the routers know
        self._changes[key] = cached
        if not self._due:
            self._due = True
            self._clock.at(max(self._clock.now, self._next_at), self._tell)

    def _tell(self) -> None:
        self._due = False
        self._next_at = self._clock.now + NEWS_GAP_S
        changes, self._changes = list(self._changes.items()), {}
        for start in range(0, len(changes), MOST_KEYS):
            part = changes[start : start + MOST_KEYS]
            self._number += 1
            gained = shortened(key for key, cached in part if cached)
            lost = shortened(key for key, cached in part if not cached)
            self._deliver(CacheNews(self._worker_id, EPOCH, self._number, begins=False, left=0, gained=gained, lost=lost))


class Busyness:
    """The workers of one role; each says when it begins to compute, and when it has ended. There may be none."""

    def __init__(self, clock: Clock, num_workers: int) -> None:
        self._clock = clock
        self._num_workers = max(1, num_workers)
        self._computing = 0
        self._share = 0.0
        self._until = 0.0

    def begin(self) -> None:
        """Note that a worker begins to compute."""
        self._change(1)

    def end(self) -> None:
        """Note that a worker has ended its step."""
        self._change(-1)

    @property
    def share(self) -> float:
        """Share of the workers' time in which they computed, from 0 to 1; recent time counts for more."""
        now = self._computing / self._num_workers
        return now + (self._share - now) * math.exp((self._until - self._clock.now) / _MEMORY_S)

    def _change(self, by: int) -> None:
        self._share, self._until = self.share, self._clock.now
        self._computing += by
