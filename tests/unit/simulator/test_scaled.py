"""A simulated cluster that sizes itself: all requests end, and what it took is counted."""

from __future__ import annotations

import numpy as np
import pytest

from autoscaler.capacity import WorkerLimits
from autoscaler.limits import Sizes
from autoscaler.scaler import Autoscaler, Present
from configs.loader import load_config
from configs.paced.profile import load_paced_profile
from protocol.cluster_view import RouterObservation
from protocol.messages.workers import Role
from simulator.cluster import Shape
from simulator.profile import Profile
from simulator.request import Request
from simulator.scaling.cluster import Delays, ScaledCluster
from simulator.scaling.sizers import SizedByAutoscaler

PACED = load_paced_profile("h200-8b")
CONFIG = load_config(
    None,
    {
        "engine": "paced",
        "disaggregation": "always",
        "routing": "load",
        "block_size": 64,
        "autoscale.sizes": "prefill=1..6,decode=1..4",
        "autoscale.hold_s": 20.0,
    },
)


def requests(rates: list[tuple[float, float]], tokens: int = 4000) -> list[Request]:
    """Prompts at each rate for so many seconds, one after the other."""
    rng, times, now = np.random.default_rng(6), [], 0.0
    for rate, seconds in rates:
        end = now + seconds
        while (now := now + rng.exponential(1 / rate)) < end:
            times.append(now)
    return [Request(index, at, (index,) * tokens, 50) for index, at in enumerate(times)]


class Given:
    """Sizes at times."""

    def __init__(self, *sizes: tuple[float, int, int]) -> None:
        self._left = list(sizes)
        self.ready: dict[float, int] = {}
        """Prefill workers that took requests, by the time."""

    def sizes(self, seen: RouterObservation, present: Present, now: float) -> Sizes | None:
        self.ready[now] = present.ready[Role.PREFILL]
        if self._left and now >= self._left[0][0]:
            _, prefill, decode = self._left.pop(0)
            return {Role.PREFILL: prefill, Role.DECODE: decode}
        return None


@pytest.mark.parametrize("routing", ["load", "cache"])
def test_every_request_is_answered_whatever_the_sizes(routing: str) -> None:
    config = CONFIG.model_copy(update={"routing": routing})
    rule = Given((5.0, 3, 1), (9.0, 1, 3), (12.0, 2, 2), (13.0, 4, 1), (14.0, 1, 1))
    cluster = ScaledCluster(Shape(1, 2), Shape(6, 4), config, Profile.of_paced(PACED), rule, Delays(2.0, 0.5))
    asked = requests([(5.0, 20.0)])
    sized = cluster.run(asked)
    assert sorted(each.index for each in sized.requests) == [each.index for each in asked]
    assert all(each.error is None for each in sized.requests)
    assert [dict(sizes)[Role.DECODE] for _, sizes in sized.changes] == [2, 1, 3, 2, 1, 1]
    assert sized.turns(Role.DECODE) == 2
    assert 20 * 2 < sized.worker_s < 30 * 5
    cluster.check_integrity()


def test_a_start_that_was_called_off_is_not_used_by_a_later_order() -> None:
    rule = Given((1.0, 2, 1), (10.0, 1, 1), (20.0, 2, 1))
    cluster = ScaledCluster(Shape(1, 1), Shape(2, 1), CONFIG, Profile.of_paced(PACED), rule, Delays(30.0))
    cluster.run(requests([(1.0, 60.0)]))
    assert min(now for now, ready in rule.ready.items() if ready == 2) == 50.0, "a start after the latest order"


def test_a_step_of_five_times_the_load_is_met() -> None:
    limits = WorkerLimits(CONFIG.decode.max_batch_size, CONFIG.decode.kv_cache_tokens)
    scaler = Autoscaler(CONFIG.autoscale, limits, PACED, prefills=True, needed=(Role.PREFILL, Role.DECODE), flips=True, now=0.0)
    sizer, profile = SizedByAutoscaler(scaler), Profile.of_paced(PACED)
    cluster = ScaledCluster(Shape(1, 1), Shape(6, 4), CONFIG, profile, sizer, Delays(2.0, 0.5))
    sized = cluster.run(requests([(3.0, 60.0), (15.0, 60.0), (3.0, 120.0)]))
    assert all(each.error is None for each in sized.requests)
    late = [each for each in sized.requests if each.ttft_s > 0.5]
    assert len(late) < 0.15 * len(sized.requests), "those of the first seconds"
    prefills = [sizes[Role.PREFILL] for _, sizes in sized.changes]
    assert max(prefills) >= 3
    assert prefills[-1] <= 2, "and they have gone again"
