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


HISTORY = st.lists(st.tuples(st.booleans(), st.integers(1, 8192), st.floats(0.001, 300), st.floats(0, 100)), max_size=12)
"""Prompts that were answered: here or there, with so many tokens, after so long, and so long after the one before."""


def after(history: list[tuple[bool, int, float, float]]) -> tuple[PrefillCosts, float]:
    costs, now = PrefillCosts(), 1000.0
    for here, num_tokens, took_s, pause_s in history:
        now += pause_s
        costs.prefilled(here, num_tokens, took_s, now)
    return costs, now


@given(history=HISTORY, here=st.booleans(), num_tokens=st.integers(1, 8192), age_s=st.floats(0.001, 1000))
def test_whatever_was_measured_a_prompt_under_way_takes_as_long_as_it_has_taken(
    history: list[tuple[bool, int, float, float]], here: bool, num_tokens: int, age_s: float
) -> None:
    costs, now = after(history)
    costs.begun(here, num_tokens, now)
    lines = costs.lines(now + age_s)
    assert lines is not None
    assert (lines.here if here else lines.there).seconds(num_tokens) >= now + age_s - now


@given(
    history=HISTORY,
    under_way=st.lists(st.tuples(st.integers(1, 8192), st.floats(0, 20)), min_size=1, max_size=6),
    size=st.integers(1, 8192),
)
def test_prompts_under_way_never_speak_for_the_way_that_they_go(
    history: list[tuple[bool, int, float, float]], under_way: list[tuple[int, float]], size: int
) -> None:
    costs, now = after(history)
    lately, lasting = costs.lines(now), costs.lines(None)
    assume(lasting is not None and any(not here for here, _, _, _ in history))
    assert lasting is not None
    for num_tokens, age_s in under_way:
        costs.begun(False, num_tokens, now - age_s)
    lines = costs.lines(now)
    assert lines is not None
    assert lines.there.seconds(size) >= lasting.there.seconds(size) * (1 - 1e-9)
    if lately is not None:
        assert lines.here.seconds(size) == pytest.approx(lately.here.seconds(size), rel=1e-6), "nor against the other"


def there_takes(costs: PrefillCosts, now: float, num_tokens: int = 2400) -> float:
    lines = costs.lines(now)
    assert lines is not None
    return lines.there.seconds(num_tokens)


@given(line=lines, bounds=st.lists(st.tuples(st.integers(0, 8192), st.floats(0, 300)), max_size=4), size=tokens, more=tokens)
def test_bounds_only_raise_a_line_and_more_tokens_still_take_no_less(
    line: Line, bounds: list[tuple[int, float]], size: int, more: int
) -> None:
    bounded = line
    for num_tokens, least_s in bounds:
        bounded = bounded.at_least(num_tokens, least_s)
        assert not num_tokens or bounded.seconds(num_tokens) >= least_s
    assert line.seconds(size) <= bounded.seconds(size) <= bounded.seconds(size + more)
    most_s = max((least_s for num_tokens, least_s in bounds if num_tokens), default=0.0)
    assert bounded.seconds(size) <= max(line.seconds(size), most_s), "a short prompt says nothing of a long one's slope"


def test_a_way_is_not_forgotten_while_it_owes_an_answer() -> None:
    costs = PrefillCosts()
    costs.prefilled(False, 2400, 170.0, 0.0)
    costs.prefilled(True, 2400, 20.0, 100.0)
    assert there_takes(costs, 100.0) == pytest.approx(20.0), "forgotten, so it is tried again"
    prompt = costs.begun(False, 2400, 100.0)
    assert there_takes(costs, 101.0) == pytest.approx(170.0), "by one prompt"
    assert there_takes(costs, 300.0) == pytest.approx(200.0)
    costs.ended(prompt)
    assert costs.lines(300.0) is None


def test_who_is_answered_later_and_sooner_refutes_a_prompt_that_is_stuck() -> None:
    costs = PrefillCosts()
    costs.prefilled(False, 2400, 1.0, 0.0)
    costs.begun(False, 2400, 0.0)
    assert there_takes(costs, 30.0) == pytest.approx(30.0)
    costs.prefilled(False, 100, 1 / 24, 30.0)
    assert there_takes(costs, 30.0) == pytest.approx(30.0), "a shorter one says little of long ones"
    costs.prefilled(False, 2400, 31.0, 30.5)
    assert there_takes(costs, 40.0) > 39, "nor does one that began before"
    costs.prefilled(False, 2400, 1.0, 40.0)
    assert there_takes(costs, 60.0) < 30


def test_a_client_that_gives_up_tells_how_long_it_took_and_a_short_wait_tells_nothing() -> None:
    costs = PrefillCosts()
    costs.left(costs.begun(False, 2400, 0.0), 0.001)
    assert costs.lines(0.001) is None
    costs.prefilled(True, 2400, 20.0, 0.0)
    prompt = costs.begun(False, 2400, 0.0)
    costs.left(prompt, 5.0)
    assert there_takes(costs, 5.0) == pytest.approx(20.0)
    prompt = costs.begun(False, 2400, 5.0)
    costs.left(prompt, 65.0)
    costs.left(prompt, 95.0)
    assert there_takes(costs, 65.0) > 50
    lost = costs.begun(False, 2400, 65.0)
    costs.ended(lost)
    costs.left(lost, 300.0)
    assert costs.lines(300.0) is None, "a worker that is lost says nothing of others"
