"""The share of time in which a worker computes, from what it reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.load import LoadReport
from router.rules.busy import WINDOW_S, BusyMeter
from tests.unit.load_reports import load_report


def report(busy_s: float, step_age_s: float = 0.0) -> LoadReport:
    return replace(load_report("d0"), busy_s=busy_s, step_age_s=step_age_s)


def test_nothing_is_known_before_the_second_report() -> None:
    meter = BusyMeter()
    assert meter.share is None
    meter.reported(report(5.0), 100.0)
    assert meter.share is None
    meter.reported(report(5.4), 100.4)
    assert meter.share is None, "too soon after the other"
    meter.reported(report(5.5), 101.0)
    assert meter.share == pytest.approx(0.5)


def test_a_long_step_counts_while_it_lasts() -> None:
    meter = BusyMeter()
    meter.reported(report(5.0), 100.0)
    meter.reported(report(5.0, 2.0), 102.0)
    assert meter.share == pytest.approx(1.0)
    meter.reported(report(7.5), 105.0)
    assert meter.share == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0.01, 4.0), st.floats(0.0, 1.0)), min_size=1, max_size=60))
def test_it_looks_back_about_so_far(parts: list[tuple[float, float]]) -> None:
    meter, now, busy_s = BusyMeter(), 0.0, 0.0
    meter.reported(report(0.0), 0.0)
    for seconds, share in parts:
        now, busy_s = now + seconds, busy_s + seconds * share
        meter.reported(report(busy_s), now)
    assert meter.share is None or 0.0 <= meter.share <= 1.0
    assert len(meter._seen) <= 2 * WINDOW_S + 3
    for _ in range(40):  # idle from now on
        now += 1.0
        meter.reported(report(busy_s), now)
    assert meter.share == 0.0
