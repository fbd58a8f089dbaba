"""Where a prompt is computed: what is measured, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.rules.disaggregation import Case, Costs, FadingLine, Line, PrefillCosts, prefill_here

tokens = st.integers(0, 8192)
seconds = st.floats(0, 1)
lines = st.builds(Line, seconds, st.floats(1e-6, 1e-2))
costs_of = st.builds(Costs, lines, lines, lines)
cases = st.builds(Case, st.integers(1, 8192), st.just(0), st.just(0), tokens, tokens, st.integers(0, 64))


@given(case=cases, costs=costs_of, more=st.integers(1, 4096))
def test_a_longer_queue_there_never_speaks_against_here_and_the_other_way_round(case: Case, costs: Costs, more: int) -> None:
    here = prefill_here(case, costs)
    assert prefill_here(replace(case, ahead_there=case.ahead_there + more), costs) >= here
    assert prefill_here(replace(case, ahead_here=case.ahead_here + more), costs) <= here
    assert prefill_here(replace(case, running=case.running + more), costs) <= here


@given(case=cases, costs=costs_of, held=st.floats(0, 0.99))
def test_what_is_held_never_speaks_against_here_where_sending_costs_no_more_than_computing(
    case: Case, costs: Costs, held: float
) -> None:
    assume(costs.handoff.per_token_s <= costs.here.per_token_s)
    assert prefill_here(replace(case, held_tokens=int(case.num_tokens * held)), costs) >= prefill_here(case, costs)


@given(case=cases, line=lines, handoff=lines)
def test_alike_and_idle_the_handoff_decides_and_under_way_the_queue(case: Case, line: Line, handoff: Line) -> None:
    costs = Costs(line, line, handoff)
    assume(handoff.fixed_s > 1e-6)
    assert prefill_here(replace(case, ahead_here=0, ahead_there=0, running=0), costs)
    assert not prefill_here(replace(case, ahead_here=case.num_tokens, ahead_there=0), replace(costs, handoff=Line(0, 0)))


def test_a_short_stall_of_streams_weighs_nothing_and_a_longer_one_all_of_it() -> None:
    costs = Costs(Line(0, 0.001), Line(0, 0.001), handoff=Line(0.045, 0))
    assert prefill_here(Case(75, 0, 0, 0, 0, running=64), costs)
    assert prefill_here(Case(80, 0, 0, 0, 0, running=1), costs)
    assert not prefill_here(Case(80, 0, 0, 0, 0, running=2), costs)
    assert not prefill_here(Case(100, 0, 0, 0, 0, running=1), costs)


@given(fixed=st.floats(0, 1), slope=st.floats(1e-5, 1e-2), sizes=st.lists(st.integers(1, 4000), min_size=2, max_size=30))
def test_a_line_is_found_again(fixed: float, slope: float, sizes: list[int]) -> None:
    assume(max(sizes) > 2 * min(sizes))
    measured = FadingLine()
    for number, size in enumerate(sizes):
        measured.add(size, fixed + slope * size, number / 10)
    line = measured.line(len(sizes) / 10)
    assert line is not None
    for size in sizes:
        assert line.seconds(size) == pytest.approx(fixed + slope * size, rel=1e-3)


@given(points=st.lists(st.tuples(st.integers(1, 8192), st.floats(0, 100)), min_size=1, max_size=30), size=tokens, more=tokens)
def test_whatever_was_measured_more_tokens_never_take_less(points: list[tuple[int, float]], size: int, more: int) -> None:
    measured = FadingLine()
    for number, (num_tokens, took_s) in enumerate(points):
        measured.add(num_tokens, took_s, float(number))
    line = measured.line(float(len(points)))
    assert line is not None
    assert 0 <= line.seconds(size) <= line.seconds(size + more)


def test_what_is_old_is_forgotten_and_what_is_not_known_taken_from_the_other() -> None:
    costs = PrefillCosts()
    assert costs.lines(0.0) is None
    costs.prefilled(False, 100, 1.0, 0.0)
    first = costs.lines(1.0)
    assert first is not None
    assert first.here == first.there
    costs.prefilled(True, 100, 9.0, 2.0)
    both = costs.lines(3.0)
    assert both is not None
    assert both.here.seconds(100) == pytest.approx(9.0)
    costs.prefilled(False, 100, 1.0, 100.0)
    again = costs.lines(101.0)
    assert again is not None
    assert again.here == again.there, "a way that was bad once is tried again"
