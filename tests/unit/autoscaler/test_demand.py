"""What is asked, from what routers tell: nothing is counted twice, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.demand import FRESH_S, DemandMeter, InTime
from protocol.cluster_view import DemandCounts, RouterObservation, WorkerSeen
from protocol.messages.workers import Role

COUNTS = DemandCounts(
    arrived=1,
    prompt_tokens=100,
    squared_tokens=10_000,
    ended=1,
    answer_tokens=20,
    first_tokens=1,
    first_in_time=1,
    read_tokens=100,
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
    assert demand.first_tokens == InTime(1.0, 1.0)


def test_a_router_counts_from_where_it_is_heard_first() -> None:
    """It tells as soon as it is up. One that nobody has heard for long may have counted a lot meanwhile."""
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 0)
    tell(meter, 2.0, 70_000, router="b")
    tell(meter, 3.0, 70_007, router="b")
    tell(meter, 3.0, 1)
    tell(meter, 1000.0, 90_000)
    tell(meter, 1001.0, 90_001)
    assert meter.num_arrived == 9


class Asked:
    """A meter that is told each second, and reads so many requests a second."""

    def __init__(self) -> None:
        self.meter = DemandMeter(0.0)
        self.now = self.number = 0

    def seconds(self, number: int, rate: int, start_s: float = 0.0) -> float:
        for _ in range(number):
            self.now += 1
            self.number += rate
            tell(self.meter, float(self.now), self.number)
        return self.meter.demand(float(self.now), start_s).rate


def test_a_change_shows_soon_and_chance_does_not() -> None:
    asked = Asked()
    asked.seconds(120, 1)
    assert asked.seconds(1, 4) < 1.2, "three more are chance"
    assert asked.seconds(20, 6) == pytest.approx(3.6, rel=0.1), "of the latest 40 s, not of more than two minutes"
    assert asked.seconds(20, 6) == pytest.approx(6.0, rel=0.1)
    assert asked.seconds(20, 0) < 0.5, "and that it is over shows as soon"


def test_what_lasts_no_longer_than_a_start_is_no_burst() -> None:
    asked = Asked()
    asked.seconds(200, 1)
    assert asked.seconds(10, 9) > 4.0
    assert asked.seconds(0, 0, start_s=30.0) < 4.0, "no worker could come before it is over"


def test_a_rate_that_stays_is_known_the_better_the_longer_it_stays() -> None:
    asked = Asked()
    for _ in range(150):
        asked.seconds(1, 10)
        asked.seconds(9, 1)
    for _ in range(100):
        assert asked.seconds(1, 1) == pytest.approx(1.9, rel=0.02), "ten at once, every ten seconds"
        assert asked.seconds(1, 10) == pytest.approx(1.9, rel=0.02)
        asked.seconds(8, 1)


@given(st.lists(st.tuples(st.floats(0.05, 60.0), st.integers(0, 20)), max_size=120), st.floats(0.0, 60.0))
def test_it_never_reads_what_did_not_come(steps: list[tuple[float, int]], start_s: float) -> None:
    meter, now, number = DemandMeter(0.0), 0.0, 0
    tell(meter, now, 0)
    for after, more in steps:
        now, number = now + after, number + more
        tell(meter, now, number)
        rate = meter.demand(now, start_s).rate
        assert 0 <= rate <= number
    assert meter.num_arrived == number


def of_computed(computed: int, **counts: int) -> float | None:
    """The computed share, where prefill workers have computed so many tokens, and one router has counted this."""
    meter = DemandMeter(0.0)
    tell(meter, 1.0, 0, WORKER)
    worker = replace(WORKER, computed_tokens=computed)
    meter.observe(RouterObservation("a", DemandCounts(**counts), 0, (worker,)), 2.0)
    lengths = meter.demand(2.0).lengths
    return None if lengths is None else lengths.computed_share


def test_prompts_that_wait_are_not_cached() -> None:
    """94 of 100 prompts wait at a worker that has too many of them, and nothing is cached."""
    asked = {"arrived": 100, "prompt_tokens": 10_000, "squared_tokens": 1_000_000}
    answered = {"ended": 1, "answer_tokens": 20, "first_tokens": 5, "read_tokens": 500}
    assert of_computed(500, **asked, **answered) == 1.0
    assert of_computed(125, **asked, **answered) == 0.25, "somebody had the rest cached"


def test_a_first_prompt_in_part_is_no_share() -> None:
    assert of_computed(50, arrived=1, prompt_tokens=100, squared_tokens=10_000, ended=1) is None


@given(st.lists(st.tuples(*4 * [st.integers(0, 10_000)]), min_size=1, max_size=15))
def test_a_share_is_from_0_to_1_whatever_is_counted(steps: list[tuple[int, ...]]) -> None:
    meter, sums = DemandMeter(0.0), [0] * 4
    tell(meter, 0.0, 0, WORKER)
    for number, step in enumerate(steps, 1):
        sums = [one + other for one, other in zip(sums, step, strict=True)]
        arrived, read, ended, computed = sums
        counts = DemandCounts(arrived=arrived, prompt_tokens=7 * arrived, read_tokens=read, ended=ended)
        worker = replace(WORKER, computed_tokens=computed)
        meter.observe(RouterObservation("a", counts, 0, (worker,)), 100.0 * number)
        lengths = meter.demand(100.0 * number).lengths
        assert lengths is None or 0.0 <= lengths.computed_share <= 1.0


def test_the_same_life_told_by_two_routers_counts_once() -> None:
    meter = DemandMeter(0.0)
    for second in range(1, 11):
        worker = replace(WORKER, busy_s=0.5 * second, computed_tokens=50 * second)
        for router in ("a", "b"):
            tell(meter, float(second), 0, worker, router=router)
        tell(meter, second + 0.1, 0, replace(worker, busy_s=worker.busy_s - 0.2), router="b")  # late news
    demand = meter.demand(10.0)
    assert demand.prefill_s == demand.prompt_s == pytest.approx(0.01)
    assert demand.role(Role.DECODE).workers == 0


def test_decode_workers_show_what_prompts_cost_where_nobody_else_does() -> None:
    meter = DemandMeter(0.0)
    for second in range(1, 11):
        tell(meter, float(second), 0, replace(WORKER, role=Role.DECODE, busy_s=0.5 * second, computed_tokens=50 * second))
    demand = meter.demand(10.0)
    assert demand.prefill_s is None
    assert demand.prompt_s == pytest.approx(0.01)


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


def test_a_stall_of_the_controller_is_no_burst() -> None:
    """Routers tell afterwards, all at once, of the requests that came while the controller was held."""
    meter = DemandMeter(0.0)
    rates = []
    for now in (*range(1, 601), *range(660, 721)):
        for router in ("a", "b"):
            tell(meter, float(now), 4 * now, router=router)
        rates.append(meter.demand(float(now)).rate)
    assert rates[100:] == pytest.approx([8.0] * 561, rel=0.05)
