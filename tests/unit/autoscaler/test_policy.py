"""Which sizes are wanted: up at once, down slowly, over before anew, and never outside the limits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.capacity import Capacity, Pace, Slo, WorkerLimits
from autoscaler.demand import Lengths
from autoscaler.limits import ranges_at, within
from autoscaler.policy import Holds, Need, decide, with_spare
from configs.autoscale import AutoscaleConfig, SizeRange
from configs.loader import load_config
from configs.paced.profile import load_paced_profile
from protocol.errors import ConfigError
from protocol.messages import Role
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


class Running:
    """A policy under way, one look a second."""

    def __init__(self, sizes: dict[Role, int], most: int | None = None, *, flips: bool = True) -> None:
        self.sizes = sizes
        self.holds = Holds(HOLD_S)
        self.now = 0.0
        self.most = most
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
                self.most,
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
    policy = Running({PREFILL: 2, DECODE: 2}, most=6)
    policy.look(2, 2, 60)
    assert sum(policy.look(8, 8).values()) == 6


@given(
    needs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=150),
    most=st.none() | st.integers(1, 16),
    flips=st.booleans(),
)
def test_any_needs(needs: list[tuple[int, int]], most: int | None, flips: bool) -> None:
    policy = Running({PREFILL: 1, DECODE: 1}, most, flips=flips)
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
)
def test_no_budget_puts_a_role_back_to_sleep_that_a_request_has_woken(
    disaggregation: str, decode: tuple[int, int], prefill: tuple[int, int] | None, workers: tuple[int, int], most: int
) -> None:
    """Of all configurations that are accepted. A role without a range keeps its workers, which count, too."""
    values: dict[str, Any] = {"disaggregation": disaggregation, "prefill.workers": workers[0], "decode.workers": workers[1]}
    sizes = f"decode={decode[0]}..{decode[1]}" + ("" if prefill is None else f",prefill={prefill[0]}..{prefill[1]}")
    try:
        config = load_config(None, values | {"autoscale.sizes": sizes, "autoscale.max_workers": most})
    except ConfigError:
        return
    ranges, present = ranges_at(config.autoscale, 0.0), {PREFILL: workers[0], DECODE: workers[1]}
    needed = needed_roles(config)
    least = {role: ranges[role].least if role in ranges else present[role] for role in present}
    woken = {role: max(1, number) if role in needed else number for role, number in least.items()}
    assert within(woken, ranges, config.autoscale.max_workers) == woken


def test_the_role_with_the_most_to_spare_gives() -> None:
    assert within({PREFILL: 3, DECODE: 8}, RANGES, 6) == {PREFILL: 3, DECODE: 3}
    assert within({PREFILL: 1, DECODE: 0}, RANGES, 1) == {PREFILL: 1, DECODE: 0}
