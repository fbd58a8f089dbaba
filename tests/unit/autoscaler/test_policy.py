"""Which sizes are wanted: up at once, down slowly, over before anew, and never outside the limits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.capacity import Capacity, Pace, Slo, WorkerLimits
from autoscaler.demand import Lengths
from autoscaler.limits import Budget, budgets_of, ranges_at, within
from autoscaler.policy import Holds, Need, decide, with_spare
from configs.autoscale import AutoscaleConfig, SizeRange
from configs.loader import load_config
from configs.paced.profile import load_paced_profile
from protocol.errors import ConfigError
from protocol.messages.workers import Role
from router.dispatch.status import needed_roles

PREFILL, DECODE = Role.PREFILL, Role.DECODE
RANGES = {PREFILL: SizeRange(least=1, most=8), DECODE: SizeRange(least=0, most=8)}
HOLD_S = 60.0
PACED = load_paced_profile("h200-8b")
lengths = st.builds(
    Lengths,
    prompt_tokens=st.floats(1, 8000),
    computed_share=st.floats(0.05, 1.0),
    variation=st.floats(0.0, 10.0),
    answer_tokens=st.floats(1, 2000),
)


def workers(most: int) -> Budget:
    """So many of both roles together."""
    return Budget(most, {PREFILL: 1.0, DECODE: 1.0})


class Running:
    """A policy under way, one look a second."""

    def __init__(self, sizes: dict[Role, int], *budgets: Budget, flips: bool = True) -> None:
        self.sizes = sizes
        self.holds = Holds(HOLD_S)
        self.now = 0.0
        self.budgets = budgets
        self.flips = flips

    def look(self, prefill: int, decode: int, seconds: int = 1, *, keep: int = 0) -> dict[Role, int]:
        """`keep`: prefill workers that are needed with half of one to spare."""
        for _ in range(seconds):
            self.now += 1.0
            needs = {PREFILL: Need(prefill, max(prefill, keep), ""), DECODE: Need(decode, decode, "")}
            for role, need in needs.items():
                self.holds.note(role, need.to_keep, self.now)
            self.sizes = decide(
                needs,
                self.holds,
                self.sizes,
                RANGES,
                self.budgets,
                self.now,
                hold_s=HOLD_S,
                flips=self.flips,
                settled=self.now >= HOLD_S,
            )
        return self.sizes


def test_more_at_once_and_fewer_after_the_hold() -> None:
    policy = Running({PREFILL: 2, DECODE: 2})
    assert policy.look(2, 2, 60) == {PREFILL: 2, DECODE: 2}
    assert policy.look(5, 2) == {PREFILL: 5, DECODE: 2}
    assert policy.look(2, 2, 59) == {PREFILL: 5, DECODE: 2}
    assert policy.look(2, 2, 2) == {PREFILL: 2, DECODE: 2}


@given(
    rate=st.floats(0.01, 60.0),
    asked=lengths,
    parts=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 300)), min_size=1, max_size=30),
)
@pytest.mark.slow
def test_a_demand_near_the_edge_of_a_size_does_not_make_it_swing(
    rate: float, asked: Lengths, parts: list[tuple[float, int]]
) -> None:
    """While it changes by no more than half a worker does, sizes grow once, and then stay."""
    reckoned = Capacity(PACED, Slo(0.5, 0.05, 0.95), WorkerLimits(256, 800_000), colocated=False)
    for reckon in (reckoned.prefill, reckoned.decode):
        room = rate * (with_spare(reckon(rate, asked, Pace())) - 1)
        policy, size = Running({PREFILL: 1, DECODE: 1}), 1
        for share, seconds in parts:
            demand = rate + share * room
            need = min(8, reckon(demand, asked, Pace()))
            keep = min(8, reckon(demand * with_spare(need), asked, Pace()))
            before, size = size, policy.look(need, 0, seconds, keep=keep)[PREFILL]
            assert size >= before
            assert size >= need


def test_a_short_lull_costs_nobody() -> None:
    policy = Running({PREFILL: 4, DECODE: 2})
    for _ in range(10):
        policy.look(4, 2, 30)
        assert policy.look(1, 2, 30) == {PREFILL: 4, DECODE: 2}


def test_workers_go_over_sooner_than_they_would_go() -> None:
    policy = Running({PREFILL: 2, DECODE: 5})
    policy.look(2, 5, 60)
    policy.look(2, 3, 20)
    assert policy.look(4, 3) == {PREFILL: 4, DECODE: 3}, "two have gone over"


def test_where_nobody_can_go_over_nobody_is_taken_away() -> None:
    policy = Running({PREFILL: 2, DECODE: 5}, flips=False)
    policy.look(2, 5, 60)
    policy.look(2, 3, 20)
    assert policy.look(4, 3) == {PREFILL: 4, DECODE: 5}


def test_what_is_still_needed_does_not_go_over() -> None:
    policy = Running({PREFILL: 2, DECODE: 5})
    policy.look(2, 5, 60)
    assert policy.look(4, 5) == {PREFILL: 4, DECODE: 5}


def test_the_budget_is_kept() -> None:
    policy = Running({PREFILL: 2, DECODE: 2}, workers(6))
    policy.look(2, 2, 60)
    assert sum(policy.look(8, 8).values()) == 6


def test_gpus_count_by_what_a_worker_of_the_role_takes() -> None:
    policy = Running({PREFILL: 1, DECODE: 1}, Budget(16, {PREFILL: 4.0, DECODE: 1.0}), flips=False)
    assert policy.look(3, 8) == {PREFILL: 2, DECODE: 8}, "20 GPUs are wanted, and prefill has the most of them to spare"
    assert policy.look(2, 8) == {PREFILL: 2, DECODE: 8}


def test_a_flip_takes_no_further_gpu() -> None:
    policy = Running({PREFILL: 2, DECODE: 5}, Budget(7 * 0.3333, {PREFILL: 0.3333, DECODE: 0.3333}))
    policy.look(2, 5, 60)
    policy.look(2, 3, 20)
    assert policy.look(4, 3) == {PREFILL: 4, DECODE: 3}
    assert policy.look(5, 3) == {PREFILL: 4, DECODE: 3}, "an eighth worker is one too many"


@given(
    needs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=150),
    gpus=st.tuples(st.sampled_from([0.0, 0.25, 0.3333, 1.0, 2.0, 8.0]), st.sampled_from([0.25, 0.3333, 1.0, 2.0, 4.0])),
    more=st.floats(0, 40),
    most=st.none() | st.integers(2, 16),
    flips=st.booleans(),
)
def test_no_needs_take_more_gpus_than_there_may_be(
    needs: list[tuple[int, int]], gpus: tuple[float, float], more: float, most: int | None, flips: bool
) -> None:
    """Of any budget that has room for one worker of each role. Only workers of roles that are alike can flip."""
    each = dict(zip((PREFILL, DECODE), gpus, strict=True))
    budget = Budget(sum(gpus) + more, each)
    budgets = (budget,) if most is None else (workers(most), budget)
    policy = Running({PREFILL: 1, DECODE: 1}, *budgets, flips=flips and gpus[0] == gpus[1])
    for prefill, decode in needs:
        before = dict(policy.sizes)
        sizes = policy.look(prefill, decode)
        taken = sum(each[role] * size for role, size in sizes.items())
        assert taken <= budget.most + 0.001
        assert most is None or sum(sizes.values()) <= most
        for role, need in ((PREFILL, prefill), (DECODE, decode)):
            asked = max(before[role], RANGES[role].clamp(need))
            assert RANGES[role].least <= sizes[role] <= asked
            if sizes[role] < RANGES[role].clamp(need) and most is None:
                assert taken + each[role] > budget.most + 0.001, "nobody is refused for whom there is room"


@given(
    needs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=150),
    most=st.none() | st.integers(1, 16),
    flips=st.booleans(),
)
def test_any_needs(needs: list[tuple[int, int]], most: int | None, flips: bool) -> None:
    policy = Running({PREFILL: 1, DECODE: 1}, *(() if most is None else [workers(most)]), flips=flips)
    for prefill, decode in needs:
        before = dict(policy.sizes)
        sizes = policy.look(prefill, decode)
        assert all(RANGES[role].least <= size <= RANGES[role].most for role, size in sizes.items())
        assert most is None or sum(sizes.values()) <= max(most, 1)
        for role, need in ((PREFILL, prefill), (DECODE, decode)):
            asked = RANGES[role].clamp(need)
            assert most is not None or sizes[role] >= min(asked, max(before[role], asked)), "what is needed is there"
            assert sizes[role] <= max(before[role], asked), "and nobody comes whom nobody needs"


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.integers(0, 9)), max_size=100), st.floats(0.05, 1.0))
def test_the_most_of_a_hold(steps: list[tuple[float, int]], share: float) -> None:
    holds, now, seen = Holds(HOLD_S), 0.0, []
    for after, need in steps:
        now += after
        holds.note(PREFILL, need, now)
        seen.append((now, need))
        expected = max((each for at, each in seen if at > now - HOLD_S * share), default=0)
        assert holds.most(PREFILL, now, HOLD_S * share) == expected


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_schedule_holds_at_its_hours() -> None:
    config = AutoscaleConfig.model_validate(
        {
            "sizes": {"decode": "1..4"},
            "schedule": [
                {"days": ["mon"], "begin": "08:00", "end": "18:00", "sizes": {"decode": "3..4"}},
                {"days": ["sat"], "begin": "22:00", "end": "06:00", "sizes": {"decode": "0..1"}},
            ],
        }
    )
    expected = {
        "2026-11-23 07:59": "1..4",
        "2026-11-23 08:00": "3..4",
        "2026-11-23 18:00": "1..4",
        "2026-11-24 09:00": "1..4",
        "2026-11-28 22:00": "0..1",
        "2026-11-29 05:59": "0..1",
        "2026-11-29 22:30": "1..4",
    }
    assert {when: str(ranges_at(config, at(when))[DECODE]) for when in expected} == expected


@given(
    st.sampled_from(["always", "auto", "never"]),
    st.tuples(st.integers(0, 3), st.integers(1, 4)),
    st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(1, 4))),
    st.tuples(st.integers(0, 4), st.integers(1, 4)),
    st.integers(1, 8),
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1, 2]), st.floats(0.5, 16)),
)
def test_no_budget_puts_a_role_back_to_sleep_that_a_request_has_woken(
    disaggregation: str,
    decode: tuple[int, int],
    prefill: tuple[int, int] | None,
    numbers: tuple[int, int],
    most: int,
    gpus: tuple[float, int, float],
) -> None:
    """Of all configurations that are accepted. A role without a range keeps its workers, which count, too."""
    values: dict[str, Any] = {"disaggregation": disaggregation, "prefill.workers": numbers[0], "decode.workers": numbers[1]}
    values |= {"prefill.resources": {"GPU": gpus[0]}, "decode.resources": {"GPU": 1}, "decode.tensor_parallel_size": gpus[1]}
    sizes = f"decode={decode[0]}..{decode[1]}" + ("" if prefill is None else f",prefill={prefill[0]}..{prefill[1]}")
    try:
        config = load_config(
            None, values | {"autoscale.sizes": sizes, "autoscale.max_workers": most, "autoscale.max_gpus": gpus[2]}
        )
    except ConfigError:
        return
    ranges, present = ranges_at(config.autoscale, 0.0), {PREFILL: numbers[0], DECODE: numbers[1]}
    needed = needed_roles(config)
    least = {role: ranges[role].least if role in ranges else present[role] for role in present}
    woken = {role: max(1, number) if role in needed else number for role, number in least.items()}
    assert within(woken, ranges, budgets_of(config.autoscale, {PREFILL: gpus[0], DECODE: float(gpus[1])})) == woken


def test_the_role_with_the_most_to_spare_gives() -> None:
    assert within({PREFILL: 3, DECODE: 8}, RANGES, [workers(6)]) == {PREFILL: 3, DECODE: 3}
    assert within({PREFILL: 1, DECODE: 0}, RANGES, [workers(1)]) == {PREFILL: 1, DECODE: 0}


def test_what_is_on_standby_has_its_gpus_already() -> None:
    config = AutoscaleConfig.model_validate({"sizes": {"decode": "1..4"}, "standby": 1, "max_gpus": 8})
    [budget] = budgets_of(config, {PREFILL: 2.0, DECODE: 2.0})
    assert not budget.exceeded_by({PREFILL: 1, DECODE: 2})
    assert budget.exceeded_by({PREFILL: 1, DECODE: 3})
