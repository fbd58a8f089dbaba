"""Whether a prompt is computed where it is decoded, or at a prefill worker. Pure.

Both ways are compared by an estimate of the time to the first token. It follows from what such prompts have taken lately, and
from what is queued:

    there   the queue of the best prefill worker + the part of the prompt that it does not hold + the handoff, which holds up
            the second token
    here    the queue of the decode worker + the part of the prompt that it does not hold + what its running streams lose

The ticket tells how much of a prompt the decode worker holds; what others hold they tell (`router.rules.caching.cache_index`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

_MEMORY_S = 30.0
"""Time constant: what was measured this long ago counts for 1/e."""
_EVIDENCE = 0.1
"""Least weight of measurements that count: one is forgotten after 70 s, so a way that was bad once is tried again."""
_STREAM_WEIGHT = 1 / 2
"""Cost of a second in which a running stream stands still, in seconds of the wait for a first token. It is less than 1, because
a client that waits for its first token has seen nothing yet."""
_NOTICED_S = 3 / 40
"""A shorter stall costs nothing: one that takes about as long as three steps is hardly seen."""
_MOST_UNDER_WAY = 4
"""Prompts under way that are looked at: those that began first."""


@dataclass(frozen=True)
class Line:
    """A straight line from a number of tokens to seconds, but where more is known."""

    fixed_s: float
    per_token_s: float
    least: tuple[tuple[int, float], ...] = ()
    """Numbers of tokens, and the seconds that they take at least. More tokens take no less, and fewer their part of it."""

    def seconds(self, num_tokens: int) -> float:
        """Seconds for this many tokens; 0 for none."""
        if not num_tokens:
            return 0.0
        found = self.fixed_s + self.per_token_s * num_tokens
        for known_tokens, least_s in self.least:
            found = max(found, least_s * min(1.0, num_tokens / known_tokens))
        return found

    def at_least(self, num_tokens: int, seconds: float) -> Line:
        """This line, with the knowledge that so many tokens take at least so many seconds."""
        if not num_tokens or self.seconds(num_tokens) >= seconds:
            return self
        return Line(self.fixed_s, self.per_token_s, (*self.least, (num_tokens, seconds)))


class FadingLine:
    """A least-squares line through recent measurements. Neither of its coefficients is negative."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._latest = 0.0

    def add(self, num_tokens: int, seconds: float, now: float) -> None:
        """Note that this many tokens took this long. `now` is the time on any monotonic clock, the same one at each call."""
        fading = math.exp((self._latest - now) / _MEMORY_S)
        self._latest = now
        x = float(num_tokens)
        self._weight = self._weight * fading + 1.0
        self._x = self._x * fading + x
        self._y = self._y * fading + seconds
        self._xx = self._xx * fading + x * x
        self._xy = self._xy * fading + x * seconds

    def line(self, now: float | None) -> Line | None:
        """The line; None if nothing was measured lately or, without `now`, if nothing ever was."""
        fading = 1.0 if now is None else math.exp((self._latest - now) / _MEMORY_S)
        if self._weight * fading < _EVIDENCE or not self._xx:
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
    """What computing a prompt takes at either place, handing it over and fetching, as lines over tokens."""

    here: Line
    there: Line
    handoff: Line
    fetch: Line = Line(0.0, 0.0)
    """Getting blocks from another worker's pool, while the computing worker waits for them."""


@dataclass(eq=False, slots=True)
class PromptUnderWay:
    """A prompt that is being computed."""

    here: bool
    num_tokens: int
    began: float


class _Way:
    """What computing prompts takes at one of the two places.

    A prompt under way has taken longer than its age: a bound that is known before the measurement is. It counts until one that
    began later, and is no shorter, was answered.
    """

    def __init__(self) -> None:
        self._measured = FadingLine()
        self._under_way: dict[PromptUnderWay, None] = {}
        """The one that began first comes first."""

    def begun(self, prompt: PromptUnderWay) -> None:
        self._under_way[prompt] = None

    def ended(self, prompt: PromptUnderWay) -> bool:
        """Forget it. False if it did not count any more."""
        counted = prompt in self._under_way
        self._under_way.pop(prompt, None)
        return counted

    def took(self, num_tokens: int, seconds: float, now: float) -> None:
        for prompt in list(islice(self._under_way, _MOST_UNDER_WAY)):
            if prompt.began < now - seconds and prompt.num_tokens <= num_tokens:
                del self._under_way[prompt]
        self._measured.add(num_tokens, seconds, now)

    def measured(self, now: float | None) -> Line | None:
        """What prompts took lately. What they ever took without `now`, or while an answer is owed."""
        return self._measured.line(None if self._under_way else now)

    def bounded(self, line: Line, now: float | None) -> Line:
        """This line, but for what the prompts under way say."""
        if now is not None and self._under_way:
            for prompt in islice(self._under_way, _MOST_UNDER_WAY):
                line = line.at_least(prompt.num_tokens, now - prompt.began)
        return line


class PrefillCosts:
    """What one router has measured of all its prompts. Times are on any monotonic clock."""

    def __init__(self) -> None:
        self._here = _Way()
        self._there = _Way()
        self._handoff = FadingLine()
        self._fetch = FadingLine()

    def begun(self, here: bool, num_tokens: int, now: float) -> PromptUnderWay:
        """Note that a prompt went to a worker that had no other one. Its end is to be told, by `ended` or `left`."""
        prompt = PromptUnderWay(here, num_tokens, now)
        self._way(here).begun(prompt)
        return prompt

    def ended(self, prompt: PromptUnderWay) -> None:
        """Note that a prompt was computed, or that its worker is lost, which says nothing of others. Idempotent."""
        self._way(prompt.here).ended(prompt)

    def left(self, prompt: PromptUnderWay, now: float) -> None:
        """Note that nobody waits for a prompt any more: a client's patience often ends before the prompt does.

        What it has taken is measured if that is more than was to be expected. Idempotent, and nothing once it has ended.
        """
        way, known, took_s = self._way(prompt.here), self.lines(None), now - prompt.began
        if way.ended(prompt) and known is not None:
            expected = known.here if prompt.here else known.there
            if took_s > expected.seconds(prompt.num_tokens):
                way.took(prompt.num_tokens, took_s, now)

    def prefilled(self, here: bool, num_tokens: int, seconds: float, now: float) -> None:
        """Note how long computing this many tokens took: from the order to the first token, but for the wait for others."""
        self._way(here).took(num_tokens, seconds, now)

    def handed_over(self, num_tokens: int, seconds: float, now: float) -> None:
        """Note that the KV of this many tokens arrived this long after the first token."""
        self._handoff.add(num_tokens, seconds, now)

    def fetched(self, num_tokens: int, seconds: float, now: float) -> None:
        """Note how long a prefill worker took to fetch the KV of this many tokens."""
        self._fetch.add(num_tokens, seconds, now)

    def lines(self, now: float | None) -> Costs | None:
        """What is known of both ways lately or, without `now`, what was ever measured. None if nothing is known.

        An unknown way is assumed to cost what was measured of the other one.
        """
        here, there = self._here.measured(now), self._there.measured(now)
        either = here or there
        free = Line(0.0, 0.0)
        if either is None:
            either = self._there.bounded(self._here.bounded(free, now), now)
            if either == free:
                return None
        here, there = self._here.bounded(here or either, now), self._there.bounded(there or either, now)
        return Costs(here, there, self._handoff.line(now) or free, self._fetch.line(now) or free)

    def _way(self, here: bool) -> _Way:
        return self._here if here else self._there


@dataclass(frozen=True)
class Case:
    """One prompt and the two workers that may compute it. All fields but `running` are in tokens."""

    num_tokens: int
    held_tokens: int
    """Tokens at the prompt's beginning whose KV the decode worker has."""
    saved_there: int
    """Tokens that the best prefill worker need not compute, since it holds or fetches them, as far as is known."""
    ahead_here: int
    """Tokens of other prompts that the decode worker computes before this one."""
    ahead_there: int
    """Tokens of other prompts that the best prefill worker computes before this one."""
    running: int
    """Streams of the decode worker that the prompt's chunks would hold up."""


def prefill_here(case: Case, costs: Costs) -> bool:
    """Tell whether the first token comes sooner if the decode worker computes the prompt itself."""
    missing = case.num_tokens - case.held_tokens
    there = there_s(case.ahead_there, case.num_tokens - case.saved_there, costs) + costs.handoff.seconds(missing)
    return here_s(case.ahead_here, missing, case.running, costs) < there


def here_s(ahead: int, missing: int, running: int, costs: Costs) -> float:
    """Seconds to the first token if a decode worker computes a prompt's `missing` tokens, and what its streams lose by it."""
    own_s = costs.here.seconds(missing)
    stalls_s = running * own_s * _STREAM_WEIGHT if own_s > _NOTICED_S else 0.0
    return costs.here.seconds(ahead) + own_s + stalls_s


def there_s(ahead: int, missing: int, costs: Costs) -> float:
    """Seconds to the first token if a prefill worker computes a prompt's `missing` tokens. The handoff comes on top."""
    return costs.there.seconds(ahead) + costs.there.seconds(missing)
