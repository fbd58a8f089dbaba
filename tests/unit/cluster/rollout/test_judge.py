"""The verdict on a new configuration: what stops it, what passes, what waits."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction
from math import comb
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.rollout.judge import (
    CHANCE,
    Outcome,
    Verdict,
    chance_of_failures,
    chance_of_long,
    figures_of,
    judge,
    together,
)
from protocol.cluster_view import RevisionCounts
from router.rules.rollout.duration_bins import GROWTH, NUM_BINS, added, bin_of, binned, end_of, quantile_s

DURATIONS = st.lists(st.floats(0.0001, 500.0), max_size=60)


def seen(durations: list[float], *, failures: int = 0, paces: list[float] = [], unanswered: list[float] = []) -> RevisionCounts:  # noqa: B006
    return RevisionCounts(
        requests=len(durations) + len(unanswered) + failures,
        failures=failures,
        first_tokens=binned(durations),
        unanswered=binned(unanswered),
        paces=binned(paces),
    )


def verdict(current: RevisionCounts, new: RevisionCounts, watched_s: float = 60.0) -> Verdict:
    return judge(current, new, watched_s=watched_s, watch_s=60.0, min_requests=20)


def spread(median_s: float, number: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [median_s * rng.lognormvariate(0.0, 0.3) for _ in range(number)]


def test_equal_workers_pass_when_they_were_watched_long_enough() -> None:
    current, new = seen(spread(0.2, 180)), seen(spread(0.2, 25, seed=2))
    assert verdict(current, new, 59.0).outcome is Outcome.WAIT
    assert verdict(current, new).outcome is Outcome.PASS


def test_too_few_requests_wait_and_say_so() -> None:
    found = verdict(seen(spread(0.2, 180)), seen(spread(0.2, 19)), 1e6)
    assert (found.outcome, found.reason) == (Outcome.WAIT, "too few requests yet: 19 of 20 at each kind of workers")


def test_a_slower_first_token_stops_before_the_time_is_over() -> None:
    found = verdict(seen(spread(0.2, 100)), seen(spread(0.6, 20)), 5.0)
    assert found.outcome is Outcome.STOP
    assert "time to the first token is longer" in found.reason
    assert "median" in found.reason


def test_a_moment_in_which_the_machine_stood_still_stops_nothing() -> None:
    """It held up all first requests at the new workers, and they are no chances of their own."""
    for number in range(10):
        assert verdict(seen(spread(0.2, 100)), seen([0.6] * number), 5.0).outcome is Outcome.WAIT
    assert verdict(seen(spread(0.2, 100)), seen([0.6] * 10), 5.0).outcome is Outcome.STOP


def test_a_slower_token_stops_while_answers_run() -> None:
    current = replace(seen(spread(0.2, 100)), running_paces=binned(spread(0.02, 40)))
    new = replace(seen(spread(0.2, 20)), running_paces=binned(spread(0.06, 20)))
    found = verdict(current, new, 5.0)
    assert found.outcome is Outcome.STOP
    assert "time per token is longer" in found.reason


def test_a_long_tail_alone_stops() -> None:
    current = seen(spread(0.2, 500))
    new = seen(spread(0.2, 60) + [3.0] * 25)
    found = verdict(current, new)
    assert found.outcome is Outcome.STOP
    assert "p90" in found.reason


def test_requests_that_get_no_first_token_at_all_stop_it() -> None:
    assert verdict(seen(spread(0.2, 100)), seen([], unanswered=[9.0] * 10), 9.0).outcome is Outcome.STOP
    assert verdict(seen(spread(0.2, 100)), seen([], unanswered=[0.1] * 10), 9.0).outcome is Outcome.WAIT


@pytest.mark.parametrize(("failures", "outcome"), [(0, Outcome.PASS), (1, Outcome.PASS), (5, Outcome.STOP)])
def test_failures_stop_if_they_are_none_of_chance(failures: int, outcome: Outcome) -> None:
    assert verdict(seen(spread(0.2, 100)), seen(spread(0.2, 25), failures=failures)).outcome is outcome


def test_failures_of_all_workers_are_no_reason() -> None:
    found = verdict(seen(spread(0.2, 100), failures=20), seen(spread(0.2, 25), failures=5))
    assert found.outcome is Outcome.PASS


@given(st.lists(st.floats(0.001, 100.0), min_size=20, max_size=200), st.integers(0, 5))
def test_nobody_is_worse_than_itself(durations: list[float], failures: int) -> None:
    same = seen(durations, failures=failures, paces=durations)
    assert verdict(same, same).outcome is Outcome.PASS


@given(st.lists(st.floats(0.001, 10.0), min_size=20, max_size=100), st.integers(1, 30))
def test_who_is_stopped_stays_stopped_when_everything_takes_longer(durations: list[float], times: int) -> None:
    current = seen(durations)
    slow = [2.5 * duration for duration in durations]
    slower = [times * duration for duration in slow]
    if verdict(current, seen(slow)).outcome is Outcome.STOP:
        assert verdict(current, seen(slower)).outcome is Outcome.STOP


@given(DURATIONS)
def test_who_is_quicker_is_never_stopped(durations: list[float]) -> None:
    quicker = [duration / 2 for duration in durations]
    assert verdict(seen(durations, paces=durations), seen(quicker, paces=quicker)).outcome is not Outcome.STOP


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_the_chance_of_failures_is_fishers(failures: int, good: int, other_failures: int, other_good: int) -> None:
    requests, other_requests = failures + good, other_failures + other_good
    failed, total = failures + other_failures, requests + other_requests
    ways = sum(comb(requests, k) * comb(other_requests, failed - k) for k in range(failures, failed + 1))
    expected = Fraction(ways, comb(total, failed)) if failures * total > requests * failed else 1
    assert chance_of_failures(failures, requests, other_failures, other_requests) == pytest.approx(float(expected), abs=1e-9)


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from((0.1, 0.5)))
def test_the_chance_of_long_durations_is_binomial(long: int, short: int, share: float) -> None:
    number = long + short
    expected = (
        1.0
        if long <= number * share
        else sum(comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(long, number + 1))
    )
    assert chance_of_long(long, number, share) == pytest.approx(expected, abs=1e-9)


def test_the_tails_of_a_million_requests_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of terms is bounded, not the time that a machine takes for them."""
    terms = 0

    def counted(value: float) -> float:
        nonlocal terms
        terms += 1
        return math.exp(value)

    monkeypatch.setattr("cluster.rollout.judge.math", SimpleNamespace(**vars(math) | {"exp": counted}))
    million = 10**6
    assert chance_of_long(million // 2, million, 0.5) == 1.0
    assert chance_of_long(501_500, million, 0.5) == pytest.approx(0.00136, rel=0.02), "three standard deviations"
    assert chance_of_long(million, million, 0.1) == 0.0
    assert chance_of_failures(500, million, 500, million) == 1.0
    assert chance_of_failures(548, million, 452, million) == pytest.approx(0.0013, rel=0.1)
    assert chance_of_failures(million, million, 0, million) == 0.0
    assert terms < 1_000


def test_equal_workers_are_rarely_stopped() -> None:
    """500 canaries of 50 requests each, of the same distribution: a ratio of 1.5 and one case in 1,000 leave next to none."""
    stopped = sum(
        verdict(seen(spread(0.2, 200, seed)), seen(spread(0.2, 50, -seed))).outcome is Outcome.STOP for seed in range(1, 501)
    )
    assert stopped <= 500 * 2 * CHANCE + 1


@given(st.lists(st.tuples(st.integers(0, 9), DURATIONS), max_size=5))
def test_all_routers_count_together(each: list[tuple[int, list[float]]]) -> None:
    total = together([seen(durations, failures=failures) for failures, durations in each])
    assert total.failures == sum(failures for failures, _ in each)
    assert added(total.first_tokens, binned([])) == binned(itertools.chain.from_iterable(durations for _, durations in each))


def test_figures_are_rounded_up_by_a_tenth_at_most() -> None:
    figures = figures_of(seen([0.2] * 9 + [1.0]))
    assert figures.ttft_p50_s is not None
    assert 0.2 <= figures.ttft_p50_s <= 0.2 * GROWTH
    assert figures.tpot_p50_s is None


@given(st.floats(0.0, 1e6))
def test_a_duration_lies_in_its_bin(seconds: float) -> None:
    number = bin_of(seconds)
    assert number in (0, NUM_BINS - 1) or end_of(number - 1) < seconds * (1 + 1e-9) <= end_of(number) * (1 + 2e-9)


@given(DURATIONS, st.sampled_from((0.5, 0.9, 1.0)))
def test_a_quantile_is_at_least_what_it_counts(durations: list[float], share: float) -> None:
    found = quantile_s(binned(durations), share)
    if not durations:
        assert found is None
        return
    assert found is not None
    counted = sum(duration <= found * (1 + 1e-9) or bin_of(duration) == NUM_BINS - 1 for duration in durations)
    assert counted >= share * len(durations)
