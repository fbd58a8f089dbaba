"""How busy the workers of one role were lately: where cores are shared, the steps of the other role are the slower for it."""

from __future__ import annotations

import math

from simulator.clock import Clock

_MEMORY_S = 1.0
"""Time constant: what was this long ago counts for 1/e."""


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
