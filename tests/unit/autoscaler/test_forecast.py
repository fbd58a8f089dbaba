"""What comes at this time of the season, and what the trend says."""

from __future__ import annotations

import math

import pytest

from autoscaler.forecast import BINS, History

SEASON_S = 9600.0
BIN_S = SEASON_S / BINS


def wave(number: int) -> int:
    return round(200 + 150 * math.sin(2 * math.pi * number / BINS))


def counted(num_bins: int, per_bin: int | None = None) -> tuple[History, float]:
    """After so many whole bins of a wave, or of one height."""
    history = History(SEASON_S)
    history.add(0, 0.0)
    for number in range(num_bins + 1):
        history.add(wave(number) if per_bin is None else per_bin, number * BIN_S + 1.0)
    return history, (num_bins + 0.01) * BIN_S


def test_a_season_says_when_it_grows() -> None:
    history, now = counted(3 * BINS)
    quarter = SEASON_S / 4
    assert history.growth(now, quarter) == pytest.approx(350 / 200, rel=0.1)
    assert history.growth(now + quarter, quarter) == pytest.approx(1.0, abs=0.05)
    assert history.growth(now + 3 * quarter, SEASON_S / 8) > 1.3


def test_it_expects_the_rate_of_this_time_of_the_season() -> None:
    history, now = counted(3 * BINS)
    quarter = SEASON_S / 4
    assert history.expected(now) == pytest.approx(200 / BIN_S, rel=0.1)
    assert history.expected(now + quarter) == pytest.approx(350 / BIN_S, rel=0.05)
    assert History(SEASON_S).expected(now) == 0.0


def test_it_never_says_less_than_now_nor_far_more() -> None:
    history, now = counted(2 * BINS)
    for step in range(BINS):
        assert 1.0 <= history.growth(now + step * BIN_S, 5 * BIN_S) <= 3.0


def test_before_two_seasons_it_goes_by_the_trend() -> None:
    flat, now = counted(30, per_bin=100)
    assert flat.growth(now, BIN_S) == pytest.approx(1.0, abs=0.02)
    rising = History(SEASON_S)
    rising.add(0, 0.0)
    for number in range(31):
        rising.add(100 + 20 * number, number * BIN_S + 1.0)
    assert rising.growth(30.01 * BIN_S, 2 * BIN_S) > 1.02


def test_nothing_is_known_at_first() -> None:
    history, now = counted(5)
    assert history.growth(now, SEASON_S) == 1.0


def test_a_former_controllers_bins_go_on() -> None:
    history, now = counted(2 * BINS)
    again = History(SEASON_S, history.bins, history.latest)
    again.add(0, now)
    again.add(0, now + BIN_S)
    history.add(0, now + BIN_S)
    assert len(again.bins) == len(history.bins)
    assert again.latest == history.latest


def test_after_a_season_without_anybody_it_begins_anew() -> None:
    history, now = counted(2 * BINS)
    history.add(1, now + 2 * SEASON_S)
    assert len(history.bins) < BINS
    assert history.growth(now + 2 * SEASON_S, SEASON_S) == 1.0


@pytest.mark.parametrize("resumed", [False, True], ids=["at work", "by the next one"])
def test_what_lies_ahead_is_forgotten_when_the_clock_is_set_back(resumed: bool) -> None:
    history, now = counted(3 * BINS)
    whole, latest = list(history.bins), history.latest
    if resumed:
        history = History(SEASON_S, whole, latest)
    history.add(1, now - 10 * BIN_S)
    assert (history.bins, history.latest) == (whole[:-10], latest - 10)
    for number in range(1, 13):
        history.add(7, now + (number - 10) * BIN_S)
    assert history.latest == latest + 2
    assert history.bins[-11:] == [7.0] * 11, "a bin that was not counted from its beginning is that before it"
    assert history.bins[-12] == history.bins[-13]
    history.add(1, 5.0)
    assert (history.bins, history.latest) == ([], -1)


def test_a_clock_that_is_set_forward_leaves_a_gap() -> None:
    history, now = counted(3 * BINS)
    last, latest = history.bins[-1], history.latest
    history.add(1, now + 10 * BIN_S)
    assert history.latest == latest + 10
    assert history.bins[-9:] == [history.bins[-10]] * 9
    history.add(1, now + BIN_S)
    assert history.latest == latest + 1
    assert last in history.bins
