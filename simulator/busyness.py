"""How busy the workers of one role were lately, which is what the other role's steps are the slower for on shared cores."""

from __future__ import annotations

import math

from simulator.clock import Clock

_MEMORY_S = 1.0
"""What was so long ago counts for 1/e."""


class Busyness:
    """Each worker says when it begins to compute, and when it has ended."""

    def __init__(self, clock: Clock, num_workers: int) -> None:
        self._clock = clock
        self._num_workers = num_workers
        self._computing = 0
        self._share = 0.0
        self._until = 0.0

    def begin(self) -> None:
        self._change(1)

    def end(self) -> None:
        self._change(-1)

    @property
    def share(self) -> float:
        """Of the workers' time, in 0..1; the more recent counts for more."""
        now = self._computing / self._num_workers
        return now + (self._share - now) * math.exp((self._until - self._clock.now) / _MEMORY_S)

    def _change(self, by: int) -> None:
        self._share, self._until = self.share, self._clock.now
        self._computing += by
