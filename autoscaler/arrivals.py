"""How many requests come per second: counts by the second, and the longest time in which their rate has not changed. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right

_RATES_S = tuple(10.0 * 2**power for power in range(9))
"""Windows of the rate, up to 43 minutes. The longest one counts in which the rate has not changed."""
_LONGEST_START_S = 40.0
"""Windows as long as this count however long a start takes."""
_NO_CHANCE = 14.0
"""So small is the logarithm of the chance of what counts as a change, by Chernoff's bound for a Poisson number: one false alarm
in weeks."""


class Arrivals:
    """When requests have arrived, up to the longest window. Those of one second count as one."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._times: list[float] = []
        self._totals: list[int] = []
        """Number of requests until each of the times."""
        self._forgotten = 0

    def add(self, count: int, since: float, now: float) -> None:
        """Take `count` requests. They are taken to have come evenly since then, which is long ago after a stall."""
        seconds = max(1, round(now - since))
        for second in range(seconds):
            if part := count * (second + 1) // seconds - count * second // seconds:
                self._insert(part, now - (seconds - 1 - second))
        old = bisect_right(self._times, now - _RATES_S[-1])
        self._forgotten = self._before(old)
        del self._times[:old], self._totals[:old]

    def rate(self, now: float, start_s: float) -> float:
        """Requests per second: the mean of the longest time in which they can be chance that came in its latest parts.

        `start_s`: what lasts no longer than the start of a worker is no burst, for a worker would come too late.
        """
        age_s = max(1.0, now - self._began)
        rate = 0.0
        latest: list[tuple[int, float]] = []
        for length_s in _RATES_S:
            if length_s < min(start_s, _LONGEST_START_S):
                continue
            count, seconds = self._latest(length_s, now), min(length_s, age_s)
            if any(_is_change(part, count * part_s / seconds) for part, part_s in latest):
                break
            rate = count / seconds
            latest.append((count, seconds))
        return rate

    def _insert(self, count: int, at: float) -> None:
        index = bisect_right(self._times, at)
        if not index or at - self._times[index - 1] >= 1.0:
            self._totals.insert(index, self._before(index))
            self._times.insert(index, at)
            index += 1
        for later in range(index - 1, len(self._totals)):
            self._totals[later] += count

    def _latest(self, length_s: float, now: float) -> int:
        """Number of requests of this many seconds."""
        return self._before(len(self._totals)) - self._before(bisect_right(self._times, now - length_s))

    def _before(self, index: int) -> int:
        return self._totals[index - 1] if index else self._forgotten


def _is_change(count: int, expected: float) -> bool:
    """Whether a count of requests is so far from the expected one that chance does not explain it."""
    mean = max(expected, 0.5)
    return (count * math.log(count / mean) if count else 0.0) - count + mean > _NO_CHANCE
