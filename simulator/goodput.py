"""The highest rate at which enough requests meet their limits, and which cluster has the best one.

Goodput is DistServe's (Zhong et al., OSDI 2024): requests per second at which 90 % of them meet all limits. Whoever is refused
has missed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError
from simulator.cluster import Shape, simulate
from simulator.profile import Profile
from simulator.request import Request
from simulator.workload import Workload

ATTAINMENT = 0.9
"""Share of the requests that has to meet the limits."""
_PRECISION = 1.02
"""The search ends when the lowest bad rate is at most this many times the highest good one."""
_FIRST_RATE, _RATE_BOUNDS = 1.0, (1e-3, 1e5)
_SETTLED = 3.0
"""How many times as long as most requests take they have to go on arriving. Else a queue that only grows looks short."""
_MOST_WORKERS = 256
"""Workers of the largest cluster: with both roles there are 32,640 up to it, each of which is simulated many times."""
_LONELY_RATE = 1e-6
"""Requests per second at which each is alone in the cluster."""

METRICS: Mapping[str, Callable[[Request], float]] = {
    "ttft": lambda request: request.ttft_s,
    "tpot": lambda request: request.tpot_s,
    "e2el": lambda request: request.last_at - request.arrival,
}


@dataclass(frozen=True)
class Targets:
    """Limits in milliseconds by metric of METRICS."""

    limits_ms: Mapping[str, float]

    def __post_init__(self) -> None:
        assert self.limits_ms, "there is something to meet"
        assert self.limits_ms.keys() <= METRICS.keys(), "a simulation has these metrics"

    def met_by(self, request: Request) -> bool:
        """Tell whether the request was answered within all limits."""
        return request.error is None and all(METRICS[name](request) * 1000 <= limit for name, limit in self.limits_ms.items())

    def attainment(self, requests: Sequence[Request]) -> float:
        """Share of the requests that meet all limits, from 0 to 1."""
        return sum(map(self.met_by, requests)) / len(requests)


def goodput(workload: Workload, shape: Shape, config: ClusterConfig, profile: Profile, targets: Targets) -> float:
    """Requests per second that the cluster takes within the targets, by bisection; 0 if it meets them at no rate.

    No rate is taken at which all arrive before a queue has had the time to grow.
    """
    return _search(workload, shape, config, profile, targets)[0]


def _search(workload: Workload, shape: Shape, config: ClusterConfig, profile: Profile, targets: Targets) -> tuple[float, bool]:
    """The goodput, and whether it is the number of requests that bounds it.

    Where no prompts begin alike, nobody asks what is cached: the choice is the same then, and sooner simulated.
    """
    if config.routing == "cache" and not workload.begin_alike(config.block_size):
        config = config.model_copy(update={"routing": "load"})

    unsettled = set()

    def good(rate: float) -> bool:
        ended = simulate(workload.at_rate(rate), shape, config, profile)
        if targets.attainment(ended) < ATTAINMENT:
            return False
        times = [METRICS["e2el"](request) for request in ended if request.error is None]
        if len(ended) / rate >= _SETTLED * float(np.quantile(times, ATTAINMENT)):
            return True
        unsettled.add(rate)
        return False

    low, high = _bracket(good)
    while low and high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    return low, high in unsettled


def refusal(workload: Workload, shape: Shape, config: ClusterConfig, profile: Profile) -> str | None:
    """Why a request is refused though it is alone, if more are than targets allow for; None if they are not."""
    ended = simulate(workload.at_rate(_LONELY_RATE), shape, config, profile)
    errors = [request.error for request in ended if request.error is not None]
    return errors[0] if (len(ended) - len(errors)) / len(ended) < ATTAINMENT else None


def _bracket(good: Callable[[float], bool]) -> tuple[float, float]:
    """Two rates: a good one or 0, and a bad one or the highest that is looked at."""
    lowest, highest = _RATE_BOUNDS
    rate = _FIRST_RATE
    if good(rate):
        while rate < highest and good(2 * rate):
            rate *= 2
        return rate, 2 * rate
    while rate > lowest:
        rate /= 2
        if good(rate):
            return rate, 2 * rate
    return 0.0, rate


def shapes(max_workers: int, *, colocated: bool = False) -> list[Shape]:
    """All clusters with up to so many workers, the smallest first; `colocated`: without prefill workers.

    Raises InvalidRequestError if not even the smallest cluster has so few workers, or if there are too many clusters.
    """
    if max_workers > _MOST_WORKERS:
        raise InvalidRequestError(f"max-workers must be at most {_MOST_WORKERS}", param="max_workers")
    if colocated:
        found = [Shape(0, workers) for workers in range(1, max_workers + 1)]
    else:
        found = [Shape(prefill, workers - prefill) for workers in range(2, max_workers + 1) for prefill in range(1, workers)]
    if not found:
        least = "1 worker" if colocated else "2 workers, one of each role"
        raise InvalidRequestError(f"a cluster has at least {least}", param="max_workers")
    return found


@dataclass(frozen=True)
class Planned:
    """One cluster of the plan, and its goodput."""

    shape: Shape
    goodput: float
    """Highest rate that meets the limits, in requests per second."""
    refusal: str | None = None
    """Why it is 0, if that is because requests are refused even alone."""
    too_few_requests: bool = False
    """Whether the cluster may take more: the requests were too few to tell."""

    @property
    def per_worker(self) -> float:
        """Requests per second and worker."""
        return self.goodput / self.shape.workers


def plan(
    workload: Workload,
    config: ClusterConfig,
    profile: Profile,
    targets: Targets,
    max_workers: int,
    on_planned: Callable[[Planned], None],
) -> list[Planned]:
    """The goodput of every shape that the configuration allows. `on_planned` is told of each when it is known."""
    found = []
    for shape in shapes(max_workers, colocated=config.disaggregation == "never"):
        rate, too_few = _search(workload, shape, config, profile, targets)
        planned = Planned(shape, rate, None if rate else refusal(workload, shape, config, profile), too_few)
        found.append(planned)
        on_planned(planned)
    return found


def best_ratio(planned: Iterable[Planned]) -> Planned:
    """The cluster with the most goodput per worker; of equal ones the smallest."""
    return max(planned, key=lambda each: (each.per_worker, -each.shape.workers))


def smallest_for(planned: Iterable[Planned], rate: float) -> Planned | None:
    """The cluster with the fewest workers that takes this rate, the best one of these; None if none does."""
    enough = [each for each in planned if each.goodput >= rate]
    return min(enough, key=lambda each: (each.shape.workers, -each.goodput), default=None)
