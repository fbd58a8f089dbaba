"""When workers leave nodes that will go: the times, and which of them drain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.nodes.leaving import Leaving, which_drain

TIMES = st.floats(0.0, 2e9)


@given(TIMES, st.floats(-1e6, 1e6))
def test_the_times_are_in_order_and_before_the_end(told_at: float, notice_s: float) -> None:
    leaving = Leaving(told_at, told_at + notice_s)
    assert told_at <= leaving.drain_by <= leaving.end_by + 1e-6
    assert leaving.end_by <= max(told_at, leaving.leaves_at)


def test_a_long_notice_and_a_short_one() -> None:
    spot = Leaving(1000.0, 1120.0)
    assert (spot.drain_by, spot.end_by) == (1060.0, 1115.0)
    short = Leaving(1000.0, 1010.0)
    assert (short.drain_by, short.end_by) == (1005.0, 1008.0)
    passed = Leaving(1000.0, 900.0)
    assert (passed.drain_by, passed.end_by) == (1000.0, 1000.0)


@given(
    st.lists(st.floats(1.0, 1000.0), max_size=6).map(sorted),
    st.integers(0, 6),
    st.integers(0, 6),
    st.floats(0.0, 1000.0),
    st.integers(0, 6),
)
def test_who_drains(notices: list[float], num_staying: int, desired: int, now: float, num_starting: int) -> None:
    going = [Leaving(0.0, notice_s) for notice_s in notices]
    drains = which_drain(going, num_staying, desired, now, num_starting=num_starting)
    assert len(drains) == len(going)
    left = num_staying + drains.count(False)
    late = any(now >= leaving.drain_by for leaving in going)
    wanted = min(desired, num_staying + num_starting)
    assert left >= min(wanted, num_staying + len(going)) or late, "in time, as many serve as are wanted and can be had"
    assert left >= min(1, desired, num_staying + len(going)), "and always one, if there is one"
    if num_staying >= desired:
        assert all(drains), "each has its replacement"
    if num_staying:
        assert all(drain for leaving, drain in zip(going, drains, strict=True) if now >= leaving.drain_by)
