"""Whether a prompt is computed where it is decoded, or at a prefill worker. Pure.

The estimate is of the time to the first token, on both ways, from what such prompts have taken lately and what is queued:

    there   what is ahead at the best prefill worker + all of the prompt + the handoff, which holds up the second token
    here    what is ahead at the decode worker + what is not held of the prompt + what its running streams lose by it

What is held at decode is known from the ticket; what a prefill worker has cached is not, and counts as nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_S = 30.0
"""What was measured counts for 1/e after so long."""
_EVIDENCE = 0.1
"""Below this weight nothing is known: one measurement is forgotten after 70 s, so a way that was bad once is tried again."""
_STREAM_WEIGHT = 1 / 2
"""A running stream that stands still for a second costs so many seconds of a first token's wait: a second is one to whoever
waits, but who waits for a first token has seen nothing yet."""
_NOTICED_S = 3 / 40
"""A shorter stall costs nothing: what takes about as long as three steps is hardly seen."""


@dataclass(frozen=True)
class Line:
    """Seconds for so many tokens."""

    fixed_s: float
    per_token_s: float

    def seconds(self, num_tokens: int) -> float:
        """Nothing takes no time."""
        return self.fixed_s + self.per_token_s * num_tokens if num_tokens else 0.0


class FadingLine:
    """A least-squares line through what was measured lately. Neither coefficient is negative."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._latest = 0.0

    def add(self, num_tokens: int, seconds: float, now: float) -> None:
        """`now` is any monotonic clock's, the same at each call."""
        fading = math.exp((self._latest - now) / _MEMORY_S)
        self._latest = now
        x = float(num_tokens)
        self._weight = self._weight * fading + 1.0
        self._x = self._x * fading + x
        self._y = self._y * fading + seconds
        self._xx = self._xx * fading + x * x
        self._xy = self._xy * fading + x * seconds

    def line(self, now: float) -> Line | None:
        """None if nothing was measured lately."""
        if self._weight * math.exp((self._latest - now) / _MEMORY_S) < _EVIDENCE or not self._xx:
            return None
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-6 * self._weight * self._xx:
            slope = (self._weight * self._xy - self._x * self._y) / spread
            fixed = (self._y - slope * self._x) / self._weight
            if slope < 0:
                return Line(self._y / self._weight, 0.0)
            if fixed >= 0:
                return Line(fixed, slope)
        return Line(0.0, self._xy / self._xx)


@dataclass(frozen=True)
class Costs:
    here: Line
    there: Line
    handoff: Line


class PrefillCosts:
    """What one router measured of all its prompts. Times are of any monotonic clock."""

    def __init__(self) -> None:
        self._here = FadingLine()
        self._there = FadingLine()
        self._handoff = FadingLine()

    def prefilled(self, here: bool, num_tokens: int, seconds: float, now: float) -> None:
        """So many tokens were computed; from the order to the first token it took this long, without the wait for others."""
        (self._here if here else self._there).add(num_tokens, seconds, now)

    def handed_over(self, num_tokens: int, seconds: float, now: float) -> None:
        """From the first token on the KV of so many tokens took this long to be there."""
        self._handoff.add(num_tokens, seconds, now)

    def lines(self, now: float) -> Costs | None:
        """Of a way that is not known the other one's costs are assumed. None if neither is known."""
        here, there = self._here.line(now), self._there.line(now)
        either = here or there
        if either is None:
            return None
        return Costs(here or either, there or either, self._handoff.line(now) or Line(0.0, 0.0))


@dataclass(frozen=True)
class Case:
    """One prompt and the two workers that may compute it. All but `running` are tokens."""

    num_tokens: int
    held_tokens: int
    """At its beginning, whose KV the decode worker has."""
    ahead_here: int
    """Of other prompts, to be computed before it."""
    ahead_there: int
    running: int
    """Streams of the decode worker that its chunks would hold up."""


def prefill_here(case: Case, costs: Costs) -> bool:
    """Whether the decode worker had better compute the prompt itself."""
    missing = case.num_tokens - case.held_tokens
    own_s = costs.here.seconds(missing)
    stalls_s = case.running * own_s * _STREAM_WEIGHT if own_s > _NOTICED_S else 0.0
    here_s = costs.here.seconds(case.ahead_here) + own_s + stalls_s
    there_s = costs.there.seconds(case.ahead_there) + costs.there.seconds(case.num_tokens) + costs.handoff.seconds(missing)
    return here_s < there_s
