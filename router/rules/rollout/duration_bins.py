"""Durations counted in bins that grow by a tenth each: a bounded number for any number of requests. Pure.

Bin 0 ends at a millisecond, each of the others a tenth later than the one before, and the last one has no end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

NUM_BINS = 128
FIRST_S = 0.001
GROWTH = 1.1

Bins = tuple[int, ...]
"""A number for each bin. An empty one has none in any."""


def bin_of(seconds: float) -> int:
    """The bin of a duration."""
    if seconds <= FIRST_S:
        return 0
    return min(NUM_BINS - 1, math.ceil(math.log(seconds / FIRST_S, GROWTH)))


def end_of(number: int) -> float:
    """The longest duration of a bin, in seconds."""
    return FIRST_S * GROWTH**number


def binned(durations: Iterable[float]) -> Bins:
    """Count durations, given in seconds, by bin."""
    bins = [0] * NUM_BINS
    for seconds in durations:
        bins[bin_of(seconds)] += 1
    return tuple(bins)


def added(first: Bins, second: Bins) -> Bins:
    """Return the sum of two counts by bin."""
    if not first or not second:
        return first or second
    return tuple(map(sum, zip(first, second, strict=True)))


def quantile_bin(bins: Sequence[int], share: float) -> int | None:
    """The bin that has the duration which `share` of all do not exceed; None if there are none."""
    total = sum(bins)
    if not total:
        return None
    wanted = max(1, math.ceil(share * total))
    return next(number for number, count in enumerate(accumulate(bins)) if count >= wanted)


def quantile_s(bins: Sequence[int], share: float) -> float | None:
    """The same duration in seconds, rounded up by at most a tenth; None if there are none."""
    number = quantile_bin(bins, share)
    return None if number is None else end_of(number)
