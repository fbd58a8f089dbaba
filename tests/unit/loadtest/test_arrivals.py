"""Send times: their mean, their spread, and that a seed fixes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import planned_times, trace_times
from protocol.errors import InvalidRequestError

rates = st.floats(0.01, 1e4)
shapes = st.one_of(st.floats(0.05, 50), st.just(math.inf))


@given(num=st.integers(1, 200), rate=rates, shape=shapes, seed=st.integers(0, 2**32))
def test_times_never_go_back_and_end_where_the_rate_says(num: int, rate: float, shape: float, seed: int) -> None:
    times = planned_times(num, rate, shape, np.random.default_rng(seed))
    assert len(times) == num
    assert times[0] >= 0
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(num / rate)
    assert (times == planned_times(num, rate, shape, np.random.default_rng(seed))).all()


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_does(shape: float) -> None:
    gaps = np.diff(planned_times(200_000, 10.0, shape, np.random.default_rng(3)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(shape), rel=0.02)
    if shape == 1.0:  # a Poisson process: of the gaps that last, as many last on
        assert (gaps > 0.2).sum() / (gaps > 0.1).sum() == pytest.approx(math.exp(-1), rel=0.02)


def test_extremes() -> None:
    rng = np.random.default_rng(0)
    assert planned_times(3, math.inf, 1.0, rng).tolist() == [0.0, 0.0, 0.0]
    assert planned_times(4, 2.0, math.inf, rng).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert planned_times(0, 2.0, 1.0, rng).tolist() == []


@pytest.mark.parametrize(
    ("rate", "shape", "param"), [(0, 1, "request_rate"), (math.nan, 1, "request_rate"), (1, 0, "burstiness")]
)
def test_what_can_not_be_is_refused(rate: float, shape: float, param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        planned_times(3, rate, shape, np.random.default_rng(0))
    assert error.value.param == param


@given(arrivals=st.lists(st.floats(0, 1e6), max_size=20), scale=st.floats(0.001, 1000))
def test_a_trace_keeps_its_rhythm(arrivals: list[float], scale: float) -> None:
    times = trace_times(arrivals, scale)
    assert times.tolist() == pytest.approx([(each - min(arrivals)) * scale for each in arrivals])
    with pytest.raises(InvalidRequestError):
        trace_times(arrivals, -scale)
