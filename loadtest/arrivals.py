"""When each request is to be sent, planned before the first one is. Pure: seconds from the start of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.errors import InvalidRequestError

Times = NDArray[np.float64]


def check_rate(rate: float, burstiness: float) -> None:
    """Raise InvalidRequestError for a rate or burstiness that is not over 0."""
    if not rate > 0:
        raise InvalidRequestError(f"request-rate must be over 0, or inf; got {rate:g}", param="request_rate")
    if not burstiness > 0:
        raise InvalidRequestError(f"burstiness must be over 0; got {burstiness:g}", param="burstiness")


def check_time_scale(time_scale: float) -> None:
    """Raise InvalidRequestError if the scale is not over 0, or has no end."""
    if not (time_scale > 0 and math.isfinite(time_scale)):
        raise InvalidRequestError(f"time-scale must be over 0; got {time_scale:g}", param="time_scale")


def planned_times(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> Times:
    """Return times of sending at `rate` requests/s on average, as `vllm bench serve` draws them (vllm/benchmarks/serve.py,
    get_request).

    Gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more even,
    infinity is a metronome. The whole is stretched so that the last request goes at exactly num_requests / rate: two seeds
    offer the same load. An infinite rate sends all at once.
    Raises InvalidRequestError for a rate or burstiness that is not over 0.
    """
    check_rate(rate, burstiness)
    if math.isinf(rate) or num_requests == 0:
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        gaps = np.full(num_requests, 1.0 / rate)
    else:
        gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), num_requests)
    times = np.cumsum(gaps)
    # Very small shapes underflow to gaps of zero.
    return times * (num_requests / rate / times[-1]) if times[-1] > 0 else np.zeros(num_requests)


def trace_times(arrivals_s: Sequence[float], time_scale: float) -> Times:
    """Return a trace's own arrival times, the first one at 0; `time_scale` 10 makes ten seconds of each.

    Raises InvalidRequestError if the scale is not over 0.
    """
    check_time_scale(time_scale)
    times = np.asarray(arrivals_s, dtype=np.float64)
    return (times - times.min()) * time_scale if len(times) else times
