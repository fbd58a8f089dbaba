"""The search for goodput, against clusters whose goodput is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.slo import (
    ATTAINMENT,
    COARSE,
    HIGHEST_STEP,
    LOWEST_STEP,
    SLOS,
    STEPS_PER_DOUBLING,
    Run,
    bracket,
    count_met,
    fitted,
    goodput,
    next_step,
    rate_of,
)
from loadtest.records import RequestRecord

STEPS = st.integers(LOWEST_STEP, HIGHEST_STEP)
SLO = SLOS[0]


def searched(met: Callable[[int, str], int], first: int) -> list[Run]:
    """All runs of a search in which `met(step, SLO)` of 20 requests meet the limits."""
    runs: list[Run] = []
    while (step := next_step(runs, first)) is not None:
        assert step not in {run.step for run in runs}, f"step {step} was run before"
        assert LOWEST_STEP <= step <= HIGHEST_STEP
        runs.append(Run(step, 20, {slo.name: met(step, slo.name) for slo in SLOS}))
    return runs


@given(st.lists(st.integers(LOWEST_STEP - 1, HIGHEST_STEP), min_size=len(SLOS), max_size=len(SLOS)), STEPS)
def test_it_finds_the_highest_good_step_of_every_slo(last_good: list[int], first: int) -> None:
    known = {slo.name: step for slo, step in zip(SLOS, last_good, strict=True)}
    runs = searched(lambda step, name: 20 if step <= known[name] else 17, first)
    for slo in SLOS:
        good, bad = bracket(runs, slo)
        assert (good is None) == (known[slo.name] < LOWEST_STEP)
        assert (bad is None) == (known[slo.name] >= HIGHEST_STEP)
        assert good is None or good <= known[slo.name]
        assert bad is None or bad > known[slo.name]
        assert good is None or bad is None or bad - good <= (1 if slo.scale == 1.0 else COARSE)


@given(STEPS, STEPS)
def test_slos_that_agree_share_their_runs(last_good: int, first: int) -> None:
    runs = searched(lambda step, name: 20 if step <= last_good else 0, first)
    ladder = abs(last_good - first) // STEPS_PER_DOUBLING + 3
    assert len(runs) <= ladder + STEPS_PER_DOUBLING.bit_length()


@given(st.data(), STEPS)
@pytest.mark.slow
def test_it_ends_whatever_the_noise(data: st.DataObject, first: int) -> None:
    runs = searched(lambda step, name: data.draw(st.sampled_from([0, 16, 19, 20])), first)
    assert len(runs) <= HIGHEST_STEP - LOWEST_STEP + 1


def noisy_runs(name: str) -> st.SearchStrategy[list[Run]]:
    counts = st.integers(1, 50).flatmap(lambda sent: st.tuples(st.just(sent), st.integers(0, sent)))
    run = st.tuples(STEPS, counts).map(lambda drawn: Run(drawn[0], drawn[1][0], {name: drawn[1][1]}))
    return st.lists(run, min_size=1, max_size=12)


@given(noisy_runs(SLO.name))
def test_the_fit_falls_and_keeps_the_sum(runs: list[Run]) -> None:
    shares = fitted(runs, SLO)
    assert set(shares) == {run.step for run in runs}
    ordered = [shares[step] for step in sorted(shares)]
    assert ordered == sorted(ordered, reverse=True)
    assert sum(shares[run.step] * run.sent for run in runs) == pytest.approx(sum(run.met[SLO.name] for run in runs))


@given(noisy_runs(SLO.name))
def test_a_good_rate_is_below_every_bad_one(runs: list[Run]) -> None:
    good, bad = bracket(runs, SLO)
    assert good is None or bad is None or good < bad
    low, high = goodput(runs, SLO)
    assert low == (0.0 if good is None else rate_of(good))
    assert high is None or high > low


@given(noisy_runs(SLO.name), st.data())
def test_looser_limits_never_have_less_goodput(runs: list[Run], data: st.DataObject) -> None:
    loose = [Run(run.step, run.sent, {SLO.name: data.draw(st.integers(run.met[SLO.name], run.sent))}) for run in runs]
    assert goodput(loose, SLO)[0] >= goodput(runs, SLO)[0]


def test_one_unlucky_run_among_good_ones_does_not_end_it() -> None:
    met: Sequence[tuple[int, int]] = ((0, 17), (8, 20), (16, 20), (24, 5))
    runs = [Run(step, 20, {SLO.name: count}) for step, count in met]
    assert ATTAINMENT > 17 / 20
    assert bracket(runs, SLO) == (16, 24)


def test_who_gets_no_answer_has_met_nothing() -> None:
    answered = RequestRecord(0, 8, 11, 0.0, ttft=0.4, e2el=0.4 + 10 * 0.035, completion_tokens=11)
    dropped = RequestRecord(1, 8, 11, 0.0, ttft=0.1, e2el=0.2, completion_tokens=11, error="429")
    met = count_met([answered, dropped])
    assert met["500/30 x 1"] == 0
    assert met["500/40 x 1"] == 1
    assert met["500/30 x 1.4"] == 1
    assert met["1000/60 x 0.5"] == 0
    assert set(met) == {slo.name for slo in SLOS}
