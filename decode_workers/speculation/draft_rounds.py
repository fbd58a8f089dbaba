"""For how many streams a draft model drafts, and how many tokens: as many as let a step make the most tokens per second. Pure.

Drafts cost time before anybody knows them, so the choice is made by their chances. A step of B streams makes B tokens in T(B).
With k drafts for each of m streams it makes B + sum of the chances of these drafts in

    D(tokens that the draft model lacks of them) + (k - 1) D(m) + T(B + m k)

where D is what a step of the draft model takes by its rows. The m streams are those whose drafts are best. Nothing is drafted
unless it brings `MARGIN` more than without (`decode_workers.speculation.choosing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_workers.speculation.choosing import MARGIN

HORIZON = 256
"""Most tokens of an answer that are counted on, when a stream's KV is to be made up for."""
Seconds = Callable[[int], float]
"""What a step of so many rows takes; more rows take no less."""


@dataclass(frozen=True)
class Candidate:
    """A stream that can be drafted for."""

    chance: float
    """Chance of a draft to be right if those before it are."""
    most: int
    """Drafts that it may have, at least one."""
    missing: int
    """Tokens that the draft model's KV lacks, at least the newest."""


@dataclass(frozen=True)
class Round:
    """What is drafted in one step."""

    counts: Sequence[int]
    """Drafts of each candidate."""
    saved_s: float
    """Seconds by which the step is expected to be faster than steps without drafts, for as many tokens."""

    @property
    def num_streams(self) -> int:
        """Streams that are drafted for."""
        return sum(map(bool, self.counts))


def best_round(candidates: Sequence[Candidate], num_rows: int, most: int, verify_s: Seconds, draft_s: Seconds) -> Round | None:
    """Return what is drafted in a step of `num_rows` streams, at most `most` drafts together; None if none pay.

    `verify_s` is what a step takes by its rows, `draft_s` what one of the draft model takes.
    """
    order = sorted(range(len(candidates)), key=lambda place: (-candidates[place].chance, candidates[place].missing))
    plain_rate = num_rows / verify_s(num_rows)
    best, depth, number, saved_s = plain_rate * (1 + MARGIN), 0, 0, 0.0
    for k in range(1, max((each.most for each in candidates), default=0) + 1):
        expected, rows, lacking = float(num_rows), num_rows, 0
        for m, place in enumerate(order, start=1):
            each = candidates[place]
            rows, lacking = rows + min(k, each.most), lacking + each.missing
            expected += _right(each.chance, min(k, each.most))
            if rows - num_rows > most:
                break
            took_s = draft_s(lacking) + (k - 1) * draft_s(m) + verify_s(rows)
            if expected > best * took_s:
                best, depth, number = expected / took_s, k, m
                saved_s = expected / plain_rate - took_s
    if not depth:
        return None
    counts = [0] * len(candidates)
    for place in order[:number]:
        counts[place] = min(depth, candidates[place].most)
    return Round(counts, saved_s)


def is_worth_making_up(missing: int, left: int, tokens_per_step: float, saved_s: float, token_s: float) -> bool:
    """Tell whether drafts will save the time that it takes to compute `missing` tokens in the draft model.

    `left` is how many tokens the answer may still get, `saved_s` what a step with drafts saves for this stream, and `token_s`
    what a missing token takes.
    """
    return missing * token_s <= saved_s * min(left, HORIZON) / tokens_per_step


def _right(chance: float, drafts: int) -> float:
    """How many of so many drafts are right, as a mean."""
    return float(drafts) if chance >= 1 else chance * (1 - chance**drafts) / (1 - chance)
