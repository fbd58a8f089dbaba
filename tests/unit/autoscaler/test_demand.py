"""What is asked, from what routers tell: nothing is counted twice, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaler.demand import FRESH_S, DemandMeter
from protocol.cluster_view import DemandCounts, RouterObservation, WorkerSeen
from protocol.messages import Role

COUNTS = DemandCounts(
    arrived=1, prompt_tokens=100, squared_tokens=10_000, ended=1, answer_tokens=20, first_tokens=1, first_in_time=1
)
WORKER = WorkerSeen("worker-0", 1, Role.PREFILL, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0)


def times(number: int) -> DemandCounts:
    return DemandCounts(*(number * value for value in vars(COUNTS).values()))


def tell(meter: DemandMeter, now: float, number: int, *workers: WorkerSeen, router: str = "a", waiting: int = 0) -> None:
    meter.observe(RouterObservation(router, times(number), waiting, workers), now)


def test_the_rate_is_of_what_came_since() -> None:
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 5000)  # a router that is older than the controller
    for second in range(2, 62):
        tell(meter, float(second), 5000 + 2 * (second - 1))
    demand = meter.demand(61.0)
    assert demand.rate == pytest.approx(2.0, rel=0.05)
    assert meter.num_arrived == 120
    assert demand.lengths is not None
    assert (demand.lengths.prompt_tokens, demand.lengths.answer_tokens) == (100.0, 20.0)
    assert demand.ttft_share == 1.0


def test_a_router_that_comes_later_counts_from_its_beginning() -> None:
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 0)
    tell(meter, 2 * FRESH_S, 7, router="b")
    tell(meter, 2 * FRESH_S, 1)
    assert meter.num_arrived == 8


def test_a_burst_shows_at_once_and_chance_does_not() -> None:
    meter = DemandMeter(0.0)
    for second in range(1, 120):
        tell(meter, float(second), second)
    tell(meter, 120.0, 123)
    assert meter.demand(120.0).rate < 1.2, "three more are chance"
    tell(meter, 121.0, 160)
    assert meter.demand(121.0).rate == pytest.approx(20.0, rel=0.1), "forty in two seconds"


def test_the_same_life_told_by_two_routers_counts_once() -> None:
    meter = DemandMeter(0.0)
    for second in range(1, 11):
        worker = replace(WORKER, busy_s=0.5 * second, computed_tokens=50 * second)
        for router in ("a", "b"):
            tell(meter, float(second), 0, worker, router=router)
        tell(meter, second + 0.1, 0, replace(worker, busy_s=worker.busy_s - 0.2), router="b")  # late news
    demand = meter.demand(10.0)
    assert demand.prefill_s == pytest.approx(0.01)
    assert demand.role(Role.PREFILL).busy == pytest.approx(0.45, abs=0.06)
    assert demand.role(Role.DECODE).workers == 0


def test_it_is_idle_when_nothing_comes_waits_or_runs() -> None:
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 1)
    tell(meter, 2.0, 1, replace(WORKER, running=1))
    tell(meter, 3.0, 1, waiting=1)
    assert meter.demand(3.0).idle_s == 0.0
    assert meter.demand(3.0).waiting == 1
    tell(meter, 9.0, 1, WORKER)
    assert meter.demand(9.0).idle_s == 6.0
    assert meter.demand(9.0).waiting == 0


def test_a_router_that_is_gone_waits_for_nothing() -> None:
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 1, waiting=9)
    assert meter.demand(1.5).waiting == 9
    assert meter.demand(1.5 + FRESH_S).waiting == 0
