"""What a step takes by the number of its rows, learned from the steps themselves. Pure.

A number of rows takes the median of its latest times, so one disturbed step says nothing, and never more than what a larger
number takes. Between two numbers that are known lies a line. Beyond them a further row is taken to cost a little of what one
row takes alone, less than on most processors, so that more rows are tried. What has not been seen for a while counts as
unknown, and is tried anew: contexts grow, and others come and go on the machine. What was seen once or twice is doubted sooner.
As is what another number of streams took: rows of one stream read one context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from statistics import median_low

REMEMBERED_STEPS = 512
"""Steps after which what so many rows took counts as unknown, if no step has had as many."""
_DOUBTED_STEPS = 16
"""The same after the first time; four times as many after each further one."""
_LATEST = 5
"""Times that count, for each number of rows."""
_ROW_SHARE = 0.1
"""A row beyond what is known is taken to cost this part of a step of one row."""


class _Seen:
    """What steps of one number of rows took lately."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=_LATEST)
        self.step = self.streams = 0

    @property
    def seconds(self) -> float:
        return median_low(self.times)

    def counts(self, step: int, streams: int) -> bool:
        """Whether it counts as known at this step, which has so many streams."""
        doubted: int = _DOUBTED_STEPS * 4 ** (len(self.times) - 1 if self.streams == streams else 0)
        return step - self.step <= min(REMEMBERED_STEPS, doubted)

    def note(self, seconds: float, step: int, streams: int) -> None:
        if step - self.step > 2 * REMEMBERED_STEPS or streams != self.streams:
            self.times.clear()
        self.times.append(seconds)
        self.step, self.streams = step, streams


class RowCosts:
    """Times of one worker's steps by number of rows. It knows as many numbers of rows as a step can have."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._known: list[tuple[int, float]] = []
        """Rows and seconds, by rising rows."""
        self._step = 0

    def note(self, num_rows: int, num_streams: int, seconds: float) -> None:
        """Take note of what a step of so many rows, of so many streams, took."""
        self._step += 1
        self._seen.setdefault(num_rows, _Seen()).note(seconds, self._step, num_streams)
        known = [(rows, each.seconds) for rows, each in self._seen.items() if each.counts(self._step, num_streams)]
        falling = sorted(known, reverse=True)
        self._known = list(accumulate(falling, lambda more, fewer: (fewer[0], min(more[1], fewer[1]))))[::-1]

    def plain_age(self, num_streams: int) -> int | None:
        """Number of steps since one had as many rows as this number of streams. None if it is not known what these take."""
        seen = self._seen.get(num_streams)
        return self._step - seen.step if seen is not None and seen.counts(self._step, num_streams) else None

    @property
    def known(self) -> bool:
        """Whether anything is known, so that `seconds` are seconds."""
        return bool(self._known)

    def seconds(self, num_rows: int) -> float:
        """What a step of so many rows takes, as far as is known. Without any knowledge: in units of a step of one row."""
        known = self._known
        if not known:
            return _beyond(num_rows)
        place = bisect_left(known, (num_rows, 0.0))
        if place < len(known) and known[place][0] == num_rows:
            return known[place][1]
        if place in (0, len(known)):
            rows, seconds = known[min(place, len(known) - 1)]
            return seconds * _beyond(num_rows) / _beyond(rows)
        (rows, seconds), (more, longer) = known[place - 1], known[place]
        return seconds + (longer - seconds) * (num_rows - rows) / (more - rows)


def _beyond(num_rows: int) -> float:
    return 1 + _ROW_SHARE * (num_rows - 1)
