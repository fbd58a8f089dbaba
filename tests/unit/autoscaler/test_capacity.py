"""How many workers a demand needs: never fewer for more, and enough where it is simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.capacity import Capacity, Pace, Slo, WorkerLimits, learned_times
from autoscaler.demand import Demand, InTime, Lengths, RoleState
from autoscaler.trust import Trust
from configs.loader import load_config
from configs.paced.profile import load_paced_profile
from configs.profiles import DecodeTime, PrefillTime
from configs.step_times import StepTimes
from protocol.messages.workers import Role
from simulator.cluster import Shape, simulate
from simulator.profile import Profile
from simulator.request import Request
from tests.cases import slow

PACED = load_paced_profile("h200-8b")
LIMITS = WorkerLimits(max_batch_size=256, decode_tokens=800_000)
SLO = Slo(ttft_s=0.5, tpot_s=0.05, attainment=0.95)
LENGTHS = Lengths(prompt_tokens=2000.0, computed_share=1.0, variation=1.0, answer_tokens=200.0)
rates = st.floats(0.01, 200.0)
lengths = st.builds(
    Lengths,
    prompt_tokens=st.floats(1, 8000),
    computed_share=st.floats(0.05, 1.0),
    variation=st.floats(0.0, 10.0),
    answer_tokens=st.floats(1, 2000),
)


def capacity(slo: Slo = SLO, *, colocated: bool = False) -> Capacity:
    return Capacity(PACED, slo, LIMITS, colocated=colocated)


@given(rate=rates, more=st.floats(1.0, 3.0), asked=lengths, colocated=st.booleans())
def test_more_demand_never_needs_fewer(rate: float, more: float, asked: Lengths, colocated: bool) -> None:
    reckoned = capacity(colocated=colocated)
    assert reckoned.decode(rate, asked, Pace()) <= reckoned.decode(rate * more, asked, Pace())
    assert reckoned.prefill(rate, asked, Pace()) <= reckoned.prefill(rate * more, asked, Pace())


@given(rate=rates, asked=lengths, slower=st.floats(1.0, 4.0))
def test_slower_workers_are_never_fewer(rate: float, asked: Lengths, slower: float) -> None:
    for need in (capacity().prefill, capacity().decode):
        assert need(rate, asked, Pace()) <= need(rate, asked, Pace(slower, slower))


@given(rate=rates, asked=lengths)
def test_what_nobody_computes_needs_nobody(rate: float, asked: Lengths) -> None:
    assert capacity().prefill(0.0, asked, Pace()) == capacity().decode(0.0, asked, Pace()) == 0
    assert capacity().prefill(rate, asked, Pace()) >= 1
    cached = replace(asked, computed_share=asked.computed_share / 2)
    assert capacity().prefill(rate, cached, Pace()) <= capacity().prefill(rate, asked, Pace())


@given(rate=rates, asked=lengths)
def test_stricter_limits_never_need_fewer(rate: float, asked: Lengths) -> None:
    patient = capacity(Slo(ttft_s=2.0, tpot_s=0.2, attainment=0.9))
    assert patient.prefill(rate, asked, Pace()) <= capacity().prefill(rate, asked, Pace())
    assert patient.decode(rate, asked, Pace()) <= capacity().decode(rate, asked, Pace())


def test_many_workers_may_be_busier_than_few() -> None:
    busy = {
        workers: max(rate for rate in np.arange(0.5, 200, 0.5) if capacity().prefill(rate, LENGTHS, Pace()) == workers)
        for workers in (1, 8)
    }
    assert busy[8] > 8 * 1.3 * busy[1]


@pytest.mark.parametrize("rate", [5.0, *slow([25.0, 60.0])])
def test_so_many_are_enough_and_far_fewer_are_not(rate: float) -> None:
    """By simulation: limits are kept with what is reckoned, and not with half as many prefill workers."""
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(1 / rate, 600))
    sizes = rng.exponential(LENGTHS.prompt_tokens, 600).clip(16, 8000).astype(int)

    def kept(shape: Shape) -> float:
        config = load_config(None, {"engine": "paced", "disaggregation": "always", "routing": "load"})
        pairs = enumerate(zip(times, sizes, strict=True))
        requests = [Request(index, float(at), (index,) * int(size), 200) for index, (at, size) in pairs]
        ended = simulate(requests, shape, config, Profile.of_paced(PACED))
        return sum(each.ttft_s <= 0.5 and each.tpot_s <= 0.05 for each in ended) / len(ended)

    prefill, decode = capacity().prefill(rate, LENGTHS, Pace()), capacity().decode(rate, LENGTHS, Pace())
    assert kept(Shape(prefill, decode)) >= 0.93
    if prefill >= 4:
        assert kept(Shape(prefill // 2, decode)) < 0.9


def test_what_was_seen_stands_for_what_was_not_measured() -> None:
    nothing = StepTimes(prefill=(), decode=())
    times = learned_times(nothing, 1e-4, LENGTHS, 8.0, 0.02)
    assert times.prefill_s([(0, 2000)]) == pytest.approx(0.2)
    assert times.decode_s(8, 2100) == pytest.approx(0.02)
    assert times.decode_s(16, 2100) == pytest.approx(0.04), "the worst that can be"
    assert learned_times(nothing, 1e-4, LENGTHS, 0.2, 0.02).decode, "fewer streams than workers say as much"
    assert learned_times(times, None, LENGTHS, 0.0, 0.0) == times, "what was seen before"


@pytest.mark.parametrize("colocated", [True, False])
def test_each_role_is_known_by_what_it_computes(colocated: bool) -> None:
    nothing = StepTimes(prefill=(), decode=())
    prompts = learned_times(nothing, 1e-4, LENGTHS, 0.0, 0.0)
    steps = learned_times(nothing, None, LENGTHS, 8.0, 0.02)
    both = learned_times(prompts, None, LENGTHS, 8.0, 0.02)
    known = [
        [role for role in Role if Capacity(times, SLO, LIMITS, colocated=colocated).knows(role)]
        for times in (nothing, prompts, steps, both)
    ]
    assert known == [[], [Role.PREFILL], [] if colocated else [Role.DECODE], list(Role)]


def test_a_limit_that_nobody_can_keep_does_not_want_everybody() -> None:
    hopeless = capacity(Slo(ttft_s=1e-6, tpot_s=1e-6, attainment=0.95))
    patient = capacity(Slo(ttft_s=9.0, tpot_s=0.05, attainment=0.95))
    assert hopeless.decode(1.0, LENGTHS, Pace()) < 20 * patient.decode(1.0, LENGTHS, Pace())
    assert hopeless.prefill(1.0, LENGTHS, Pace()) < 5
    few = Capacity(PACED, SLO, LIMITS, colocated=False, most=3)
    assert few.decode(1e4, LENGTHS, Pace()) == few.prefill(1e4, LENGTHS, Pace()) == 3


def test_a_step_takes_some_time_where_the_lines_of_a_profile_get_to_zero() -> None:
    """Lines that go on below their first point, and above their last one, as these end, get to 0."""
    times = StepTimes(
        prefill=(PrefillTime(tokens=64, start=0, seconds=0.001), PrefillTime(tokens=128, start=0, seconds=0.01)),
        decode=(DecodeTime(batch=1, context=10, seconds=0.02), DecodeTime(batch=2, context=10, seconds=0.001)),
    )
    short = Lengths(prompt_tokens=8.0, computed_share=1.0, variation=1.0, answer_tokens=200.0)
    roles = {Role.PREFILL: RoleState(workers=1), Role.DECODE: RoleState(workers=1, running=8, step_s=0.02, held_tokens=80)}
    none = InTime(None, None)
    demand = Demand(1.0, short, 0, first_tokens=none, paced=none, roles=roles, prefill_s=1e-4, prompt_s=None, idle_s=0.0)
    pace = Trust(0.95).pace(demand, times)
    assert pace.prefill > 1.0
    assert pace.decode > 1.0
    for colocated in (False, True):
        reckoned = Capacity(times, SLO, LIMITS, colocated=colocated)
        assert reckoned.prefill(1.0, short, pace) == reckoned.decode(1.0, short, pace) == 1
