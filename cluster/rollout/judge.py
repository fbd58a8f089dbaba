"""Whether the workers of a new configuration are as good as the others: a verdict on what routers have seen. Pure.

    failures significantly more ───────────► stop        Fisher's exact test, one-sided
    median or p90 significantly longer ────► stop        a binomial test, beyond a stated ratio
    watched long enough, on enough requests ► pass
    otherwise ─────────────────────────────► wait

A test is significant where chance alone would bring about such a difference, or a larger one, in one of 1,000 cases. Requests
of both kinds differ by chance alone (`router.rules.rollout.revisions`), so nothing about them has to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocol.cluster_view import RevisionCounts, RevisionFigures
from router.rules.rollout.duration_bins import GROWTH, Bins, added, end_of, quantile_bin, quantile_s

CHANCE = 0.001
"""Probability below which a difference is none of chance."""
MOST_TIMES = 1.5
"""Times as long as at the other workers that the median and p90 may be."""
_QUANTILES = (0.5, 0.9)
_LEAST_COMPARED = 10
"""Requests of either kind below which durations are not compared: those that a machine holds up together are no chances of
their own.
"""
_NEGLIGIBLE = 1e-12
"""Share of a sum below which its terms, and those after them, change nothing."""
_SIGMAS = 2.0
"""Standard deviations by which a quantile of the other workers may be higher than the one that was measured."""


class Outcome(Enum):
    WAIT = "wait"
    PASS = "pass"
    STOP = "stop"


class WorseError(Exception):
    """The rollout is to be rolled back, for the reason in the message."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str
    """The reason for the verdict, in words for operators."""


def judge(current: RevisionCounts, new: RevisionCounts, *, watched_s: float, watch_s: float, min_requests: int) -> Verdict:
    """The verdict after `watched_s` seconds of at least `watch_s`, with at least `min_requests` first tokens of either kind."""
    if (problem := failing(current, new) or slower(current, new)) is not None:
        return Verdict(Outcome.STOP, problem)
    fewest = min(sum(current.first_tokens), sum(new.first_tokens))
    if fewest < min_requests:
        return Verdict(Outcome.WAIT, f"too few requests yet: {fewest} of {min_requests} at each kind of workers")
    if watched_s < watch_s:
        return Verdict(Outcome.WAIT, f"as good as the others so far; it takes {watch_s:g} s to be sure")
    return Verdict(Outcome.PASS, f"as good as the others in {new.requests} requests")


def failing(current: RevisionCounts, new: RevisionCounts) -> str | None:
    """Say that significantly more requests fail at the new workers; None if not."""
    if new.failures == 0 or current.requests == 0:
        return None
    chance = chance_of_failures(new.failures, new.requests, current.failures, current.requests)
    if chance >= CHANCE:
        return None
    others = f"{current.failures} of {current.requests}"
    return f"{new.failures} of {new.requests} requests failed at the new workers, and {others} at the others"


def slower(current: RevisionCounts, new: RevisionCounts) -> str | None:
    """Say that significantly many requests take too long at the new workers; None if not."""
    first = _slower("the time to the first token", current.first_tokens, new.first_tokens, new.unanswered)
    return first or _slower("the time per token", _paces(current), _paces(new), ())


def figures_of(counts: RevisionCounts) -> RevisionFigures:
    """Return the figures of one revision that operators see."""
    firsts, paces = counts.first_tokens, _paces(counts)
    return RevisionFigures(
        requests=counts.requests,
        failures=counts.failures,
        ttft_p50_s=quantile_s(firsts, 0.5),
        ttft_p90_s=quantile_s(firsts, 0.9),
        tpot_p50_s=quantile_s(paces, 0.5),
        tpot_p90_s=quantile_s(paces, 0.9),
    )


def together(counts: Sequence[RevisionCounts]) -> RevisionCounts:
    """The counts of all routers."""
    total = RevisionCounts()
    for each in counts:
        total = RevisionCounts(
            requests=total.requests + each.requests,
            failures=total.failures + each.failures,
            first_tokens=added(total.first_tokens, each.first_tokens),
            unanswered=added(total.unanswered, each.unanswered),
            paces=added(total.paces, each.paces),
            running_paces=added(total.running_paces, each.running_paces),
        )
    return total


def chance_of_failures(failures: int, requests: int, other_failures: int, other_requests: int) -> float:
    """Probability that so many failures of both together, or more, fall to these requests by chance (hypergeometric tail).

    It is 1 where so many are no more than must be expected: nobody asks further.
    """
    total, failed = requests + other_requests, failures + other_failures
    most = min(requests, failed)
    ways = _log_choose(total, failed)
    if failures * total <= requests * failed:
        return 1.0
    tail = 0.0
    for count in range(failures, most + 1):
        term = math.exp(_log_choose(requests, count) + _log_choose(other_requests, failed - count) - ways)
        tail += term
        if term <= tail * _NEGLIGIBLE:  # as below
            break
    return min(1.0, tail)


def chance_of_long(long: int, number: int, share: float) -> float:
    """Probability that of `number` durations at least so many are long, where each is with a probability of `share`.

    It is 1 where so many are no more than must be expected: nobody asks further.
    """
    if long <= number * share:
        return 1.0
    odds = share / (1.0 - share)
    term = math.exp(_log_choose(number, long) + long * math.log(share) + (number - long) * math.log(1.0 - share))
    total = 0.0
    for count in range(long, number + 1):
        total += term
        if term <= total * _NEGLIGIBLE:  # beyond what is expected each term is smaller than the one before
            break
        term *= odds * (number - count) / (count + 1)
    return min(1.0, total)


def _slower(what: str, current: Bins, new: Bins, pending: Bins) -> str | None:
    number = sum(current)
    if number < _LEAST_COMPARED or sum(new) + sum(pending) < _LEAST_COMPARED:
        return None
    for share in _QUANTILES:
        # What was measured of the others may be too low by chance.
        highest = share + _SIGMAS * math.sqrt(share * (1.0 - share) / number)
        limit = quantile_bin(current, min(1.0, highest))
        assert limit is not None, "there are some"
        limit += math.ceil(math.log(MOST_TIMES, GROWTH))
        # Who still waits, and has waited for too long by now, is known to be long.
        waiting = sum(pending[limit + 1 :])
        long, all_new = sum(new[limit + 1 :]) + waiting, sum(new) + waiting
        if long and chance_of_long(long, all_new, 1.0 - share) < CHANCE:
            name = "median" if share == _QUANTILES[0] else "p90"
            usual = quantile_s(current, share)
            assert usual is not None, "there are some"
            return (
                f"{what} is longer: {long} of {all_new} requests took over {end_of(limit) * 1e3:.0f} ms at the new workers, "
                f"and the {name} of the others is {usual * 1e3:.0f} ms"
            )
    return None


def _paces(counts: RevisionCounts) -> Bins:
    return added(counts.paces, counts.running_paces)


def _log_choose(total: int, chosen: int) -> float:
    if not 0 <= chosen <= total:
        return -math.inf
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
