"""How many drafts are verified: never more than pay, by what is known of chances and costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_workers.speculation.acceptance import Acceptance
from decode_workers.speculation.choosing import MARGIN, draft_counts
from decode_workers.speculation.row_costs import REMEMBERED_STEPS, RowCosts

STREAMS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), max_size=8)


def expected(chances: list[float], counts: list[int]) -> float:
    return sum(chance**place for chance, count in zip(chances, counts, strict=True) for place in range(1, count + 1))


@settings(max_examples=2_000)
@given(STREAMS, st.integers(0, 4), st.integers(0, 40), st.lists(st.floats(0.0, 1.0), min_size=60, max_size=60))
@pytest.mark.slow
def test_what_is_drafted_pays_and_nothing_pays_more(
    streams: list[tuple[float, int]], others: int, most: int, more: list[float]
) -> None:
    """Whatever rows cost, each a little more than the one before or a lot."""
    chances, lengths = [chance for chance, _ in streams], [length for _, length in streams]
    num_rows = max(1, len(streams) + others)
    times = [1.0]
    for each in more:
        times.append(times[-1] + each)
    counts = draft_counts(chances, lengths, num_rows, most, lambda rows: times[rows])
    assert all(0 <= count <= length for count, length in zip(counts, lengths, strict=True))
    assert sum(counts) <= most
    without = num_rows / times[num_rows]
    rate = (num_rows + expected(chances, counts)) / times[num_rows + sum(counts)]
    if any(counts):
        assert rate > without * (1 + MARGIN) * (1 - 1e-9)
    places = sorted((c**p for c, n in streams for p in range(1, n + 1)), reverse=True)
    for further in range(1, min(most, len(places)) + 1):
        best = (num_rows + sum(places[:further])) / times[num_rows + further]
        assert best <= max(rate, without * (1 + MARGIN)) * (1 + 1e-9)


@given(STREAMS, st.integers(1, 64))
def test_rows_as_dear_as_streams_are_never_drafted(streams: list[tuple[float, int]], others: int) -> None:
    """As in a full step: no token comes sooner for it, however sure the drafts are."""
    chances, lengths = [chance for chance, _ in streams], [length for _, length in streams]
    assert not any(draft_counts(chances, lengths, len(streams) + others, 64, float))


@pytest.mark.parametrize(("chance", "looked_at"), [(0.0, 2), (0.01, 2), (0.99, 258)])
def test_no_more_is_looked_at_than_may_pay(chance: float, looked_at: int) -> None:
    """Neither all drafts of all streams, nor a row more where even all of them would not pay if they cost nothing."""
    asked: list[int] = []

    def seconds(rows: int) -> float:
        asked.append(rows)
        return 1.0

    draft_counts([chance] * 256, [32] * 256, 256, 256, seconds)
    assert len(asked) <= looked_at


def test_rows_that_cost_nothing_are_all_drafted() -> None:
    assert draft_counts([1.0, 0.9], [3, 2], 2, 64, lambda rows: 1.0) == [3, 2]


def test_the_surest_go_first() -> None:
    assert draft_counts([0.5, 0.95], [4, 4], 2, 3, lambda rows: 1.0) == [0, 3]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_a_chance_is_a_chance(steps: list[tuple[int, int]]) -> None:
    known = Acceptance()
    for right, wrong in steps:
        known.note(right, right + wrong)
        assert 0 < known.chance < 1


@pytest.mark.parametrize(("right", "chance"), [(0, 0.0), (4, 1.0), (1, 0.5)])
def test_the_latest_drafts_decide(right: int, chance: float) -> None:
    known = Acceptance()
    for _ in range(50):
        known.note(4 - right, 4)
    for _ in range(50):
        known.note(right, 4)
    assert known.chance == pytest.approx(chance, abs=0.03)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), max_size=80), st.integers(1, 128))
def test_costs_are_known_for_every_number_of_rows(seen: list[tuple[int, float]], rows: int) -> None:
    costs = RowCosts()
    for count, seconds in seen:
        costs.note(count, 1, seconds)
    assert 0 < costs.seconds(rows) <= costs.seconds(rows + 1) * (1 + 1e-9), "more rows never take less"


def test_costs_lie_on_a_line_between_what_was_seen() -> None:
    costs = RowCosts()
    costs.note(2, 2, 0.010)
    costs.note(6, 2, 0.030)
    assert costs.seconds(4) == pytest.approx(0.020)
    assert costs.seconds(2) == 0.010
    assert costs.seconds(7) > 0.030


def test_one_disturbed_step_says_nothing() -> None:
    costs = RowCosts()
    for seconds in (0.01, 0.01, 1.0, 0.01, 0.01):
        costs.note(4, 4, seconds)
    assert costs.seconds(4) == 0.01


def test_what_was_seen_once_is_doubted_sooner_than_what_was_seen_often() -> None:
    for times, remembered in ((1, 16), (2, 64), (5, REMEMBERED_STEPS)):
        costs = RowCosts()
        for _ in range(times):
            costs.note(8, 1, 5.0)
        for step in range(1, remembered + 2):
            costs.note(1, 1, 0.01)
            assert (costs.seconds(8) == 5.0) == (step <= remembered), f"after {step} steps"


def test_what_other_numbers_of_streams_took_is_doubted_soon() -> None:
    """8 rows of one stream, which read one context, and then of 8, which read one each."""
    costs = RowCosts()
    for _ in range(5):
        costs.note(8, 1, 1.0)
    for step in range(1, 20):
        costs.note(12, 8, 5.0)
        assert (costs.seconds(8) == 1.0) == (step <= 16)
        assert (costs.plain_age(8) is None) == (step > 16)
    costs.note(8, 8, 4.0)
    assert costs.seconds(8) == 4.0, "not the median of both"


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("num_streams", [1, 8, 64])
def test_what_is_learned_is_never_much_slower_than_no_drafts(num_streams: int, chance: float, share: float) -> None:
    """A machine whose rows cost a given share of a step of one row. All that is not known is found out on the way."""
    rng = random.Random(3)
    costs = RowCosts()
    known = [Acceptance() for _ in range(num_streams)]
    tokens = took = 0.0

    def step_s(rows: int) -> float:
        return 1 + share * (rows - 1)

    for step in range(2_000):
        counts = [0] * num_streams
        if step % 64:
            chances = [each.chance for each in known]
            counts = draft_counts(chances, [4] * num_streams, num_streams, min(64, 4 * num_streams), costs.seconds)
        for each, count in zip(known, counts, strict=True):
            right = 0
            while right < max(count, 1) and rng.random() < chance:
                right += 1
            each.note(right, max(count, 1))  # without a draft, what would have been one is looked at
            tokens += 1 + min(right, count)
        seconds = step_s(num_streams + sum(counts))
        took += seconds
        costs.note(num_streams + sum(counts), num_streams, seconds)
    without = num_streams / step_s(num_streams)
    assert tokens / took > 0.98 * without
    if (chance, share, num_streams) == (0.9, 0.02, 1):
        assert tokens / took > 3 * without
