"""What a stream's tokens cost at a decode worker, by what its steps have taken lately. Pure.

A step takes the longer the more KV it reads. All decode workers of a cluster are alike, so one line through the latest steps of
all of them says what a worker's steps will take with one stream more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.messages.load import LoadReport
from router.rules.disaggregation import FadingLine, Line

_MEMORY_S = 60.0
"""Time constant of the mean length of answers."""


@dataclass(frozen=True)
class Pace:
    """Duration of steps and length of answers, as they were lately."""

    step: Line
    """Line from the KV blocks that streams hold to the seconds of a step."""
    answer_tokens: float
    """Mean length of an answer."""

    def seconds(self, blocks: int) -> float:
        """Seconds that an answer takes at a worker whose streams, this one among them, hold so many blocks."""
        return self.answer_tokens * self.step.seconds(blocks)


class PaceMeter:
    """What one router has seen of steps and answers. Times are on any monotonic clock."""

    def __init__(self) -> None:
        self._step = FadingLine()
        self._weight = self._tokens = 0.0
        self._latest = 0.0

    def reported(self, report: LoadReport, now: float) -> None:
        """Note a load report. Workers without a running stream say nothing of steps."""
        decode = report.decode
        if decode is not None and decode.step_s and report.running:
            self._step.add(report.total_blocks - report.free_blocks, decode.step_s, now)

    def answered(self, num_tokens: int, now: float) -> None:
        """Note the length of an answer that has ended."""
        fading = math.exp((self._latest - now) / _MEMORY_S)
        self._latest = now
        self._weight = self._weight * fading + 1.0
        self._tokens = self._tokens * fading + num_tokens

    def pace(self) -> Pace | None:
        """What is known, however long ago it was. None if there were no steps or no answers yet.

        Where steps do not take the longer the more their streams hold, one worker's pace is as good as another's.
        """
        step = self._step.line(None)
        return None if step is None or not self._weight else Pace(step, self._tokens / self._weight)
