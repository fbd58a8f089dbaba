"""The autoscaler as a whole: who is woken, when it keeps quiet, and what outlives it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from autoscaler.capacity import WorkerLimits
from autoscaler.scaler import Autoscaler, Present, ScalerRecord
from configs.loader import load_config
from configs.paced.profile import load_paced_profile
from configs.step_times import StepTimes
from protocol.cluster_view import DemandCounts, RouterObservation, SizeChanges, SizeDecision, WorkerSeen
from protocol.messages.workers import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PACED = load_paced_profile("h200-8b")
WORKERS = (
    WorkerSeen("worker-0", 1, PREFILL, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0),
    WorkerSeen("worker-1", 1, DECODE, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0),
)


class Running:
    """An autoscaler that is asked once a second, and obeyed at once."""

    def __init__(
        self,
        now: float = 0.0,
        record: ScalerRecord | None = None,
        needed: tuple[Role, ...] = (DECODE,),
        gpus: tuple[int, int] = (0, 0),
        times: StepTimes | None = PACED,
        **values: Any,
    ) -> None:
        """`gpus`: of a worker of each role."""
        defaults = {"sizes": "prefill=1..8,decode=0..8", "hold_s": 30.0, "idle_s": 60.0}
        pools = zip(("prefill", "decode"), gpus, strict=True)
        reserved = {f"{role}.resources": {"GPU": number} for role, number in pools if number}
        self.config = load_config(None, reserved | {f"autoscale.{key}": value for key, value in (defaults | values).items()})
        self.now = now
        self.asked = 0.0
        self.counts = DemandCounts()
        self.sizes = {PREFILL: 1, DECODE: 1}
        self.missing = 0
        """Prefill workers that are wanted and do not come."""
        self.both = 0
        """Decode workers that do both."""
        self.scaler = Autoscaler(
            self.config.autoscale,
            WorkerLimits(256, 800_000),
            times,
            prefills=True,
            needed=needed,
            flips=True,
            now=now,
            gpus={PREFILL: self.config.prefill.gpus, DECODE: self.config.decode.gpus},
            record=record or ScalerRecord(),
        )

    def second(self, rate: float = 0.0, waiting: int = 0) -> None:
        """Prompts of 4,000 tokens and answers of 100 come at this rate."""
        self.now += 1.0
        self.asked += rate
        more = int(self.asked) - self.counts.arrived
        counts = self.counts
        self.counts = replace(
            counts,
            arrived=counts.arrived + more,
            prompt_tokens=counts.prompt_tokens + 4000 * more,
            squared_tokens=counts.squared_tokens + 4000**2 * more,
            ended=counts.ended + more,
            answer_tokens=counts.answer_tokens + 100 * more,
            read_tokens=counts.read_tokens + 4000 * more,
        )
        computed = self.counts.prompt_tokens
        workers = (replace(WORKERS[0], busy_s=computed * 3.5e-5, computed_tokens=computed), WORKERS[1])
        self.scaler.observe(RouterObservation("router", self.counts, waiting, workers), self.now)
        present = Present(self.sizes, {**self.sizes, PREFILL: self.sizes[PREFILL] - self.missing}, 5.0, self.both)
        decision = self.scaler.wake(present, self.now) or self.scaler.decide(present, self.now)
        if decision is not None:
            self.scaler.keep(decision, self.sizes)
            self.sizes = dict(decision.sizes)

    def seconds(self, number: int, rate: float = 0.0) -> dict[Role, int]:
        for _ in range(number):
            self.second(rate)
        return self.sizes


def test_it_grows_with_the_demand_and_says_why() -> None:
    running = Running()
    assert running.seconds(90, 2.0) == {PREFILL: 1, DECODE: 1}
    assert running.seconds(30, 20.0)[PREFILL] >= 4
    reason = running.scaler.decisions[0].reason
    assert reason.startswith("prefill 1 → ")
    assert "requests/s of 4000 + 100 tokens" in reason
    assert running.seconds(180, 2.0)[PREFILL] == 1
    sizes = [1, *(decision.sizes[PREFILL] for decision in running.scaler.decisions)]
    steps = [after - before for before, after in pairwise(sizes)]
    counted = {changes.role: (changes.up, changes.down) for changes in running.scaler.changes}
    assert counted == {PREFILL: (sum(step > 0 for step in steps), sum(step < 0 for step in steps)), DECODE: (0, 0)}
    assert min(counted[PREFILL]) >= 1


def test_prefill_is_sized_by_what_it_does_where_no_decode_step_was_ever_seen() -> None:
    """As where every answer has one token, which prefill workers make."""
    running = Running(times=None)
    sizes = running.seconds(60, 20.0)
    assert sizes[PREFILL] >= 4
    assert sizes[DECODE] == 1, "nothing is known of it"


def test_a_flip_is_one_change_up_and_one_down_and_both_outlive_the_controller() -> None:
    running = Running()
    running.scaler.keep(SizeDecision(1.0, {PREFILL: 2, DECODE: 1}, "a flip"), {PREFILL: 1, DECODE: 2})
    again = Running(record=running.scaler.record())
    again.scaler.keep(SizeDecision(2.0, {PREFILL: 3, DECODE: 1}, "more"), {PREFILL: 2, DECODE: 1})
    assert again.scaler.changes == (SizeChanges(PREFILL, up=2), SizeChanges(DECODE, down=1))


def test_what_nobody_asks_goes_to_sleep_and_a_request_wakes_it() -> None:
    running = Running()
    running.seconds(40, 2.0)
    assert running.seconds(55) == {PREFILL: 1, DECODE: 1}
    assert running.seconds(40) == {PREFILL: 1, DECODE: 0}, "prefill has its least"
    assert "nothing was asked for 60 s" in running.scaler.decisions[-1].reason
    running.second(waiting=1)
    assert running.sizes == {PREFILL: 1, DECODE: 1}
    assert running.scaler.decisions[-1].reason == "decode 0 → 1: a request waits"


def test_who_is_woken_keeps_the_budget() -> None:
    running = Running(needed=(PREFILL, DECODE), gpus=(2, 1), sizes="prefill=0..8,decode=0..8", max_gpus=5)
    running.sizes = {PREFILL: 0, DECODE: 5}
    running.second(waiting=1)
    assert running.sizes == {PREFILL: 1, DECODE: 3}
    assert running.scaler.decisions[-1].reason.startswith("prefill 0 → 1: a request waits")
    running.scaler.pause("by hand")
    running.sizes = {PREFILL: 0, DECODE: 5}
    running.second(waiting=1)
    assert running.sizes == {PREFILL: 1, DECODE: 5}, "what an operator has said stays"


def test_paused_it_wakes_and_does_nothing_else() -> None:
    running = Running()
    running.scaler.pause("by hand")
    assert running.seconds(60, 30.0) == {PREFILL: 1, DECODE: 1}
    running.sizes = {PREFILL: 1, DECODE: 0}
    running.second(waiting=1)
    assert running.sizes == {PREFILL: 1, DECODE: 1}
    running.scaler.resume()
    assert running.seconds(5, 30.0)[PREFILL] > 1


def test_prefill_does_not_sleep_while_a_decode_worker_does_both() -> None:
    running = Running(needed=(PREFILL, DECODE), sizes="prefill=0..8,decode=0..8")
    asleep = Present({PREFILL: 0, DECODE: 1}, {PREFILL: 0, DECODE: 1}, None)
    running.sizes = dict(asleep.wanted)
    running.scaler.pause("by hand")
    running.second(waiting=1)
    assert running.sizes[PREFILL] == 1
    assert running.scaler.wake(asleep, running.now) is not None
    assert running.scaler.wake(replace(asleep, both=1), running.now) is None


def test_prefill_gets_workers_when_those_that_do_both_are_not_enough() -> None:
    running = Running(needed=(PREFILL, DECODE), sizes="prefill=0..8,decode=1..8")
    running.both, running.sizes = 1, {PREFILL: 0, DECODE: 2}
    assert running.seconds(120, 0.2)[PREFILL] == 0
    assert running.seconds(60, 20.0)[PREFILL] >= 4, "it counts as a decode worker"
    assert running.seconds(180, 0.2)[PREFILL] == 1
    assert running.seconds(120)[PREFILL] == 0


def test_what_was_needed_while_it_was_paused_counts() -> None:
    running = Running()
    running.seconds(60, 20.0)
    grown = dict(running.sizes)
    running.scaler.pause("a rollout")
    running.seconds(10, 20.0)
    running.scaler.resume()
    assert running.seconds(4, 0.0) == grown, "it was needed within the hold"


def test_the_next_one_goes_on() -> None:
    running = Running(season_s=960.0)
    running.seconds(200, 20.0)
    running.scaler.pause("scaled by hand")
    adapter = TypeAdapter(ScalerRecord)
    record = adapter.validate_json(adapter.dump_json(running.scaler.record()))
    assert record == running.scaler.record()
    assert len(record.bins) >= 18
    again = Running(running.now, record, season_s=960.0)
    assert again.scaler.paused == "scaled by hand"
    assert again.scaler.decisions == running.scaler.decisions
    again.scaler.resume()
    again.sizes = dict(running.sizes)
    assert again.seconds(20, 20.0) == running.sizes, "it knows nothing of the rate at first, and takes nobody away"


def test_a_season_is_prepared_for() -> None:
    """At the same rate, it wants more before the hour at which it has always grown."""
    low, high, season_s = 2, 24, 960.0
    bins = ([float(low * 10)] * 48 + [float(high * 10)] * 48) * 4
    begins = 10_000 * season_s

    def begun(at: int) -> Running:
        record = ScalerRecord(bins=tuple(bins[: 3 * 96 + at // 10]), latest_bin=960_000 + at // 10 - 1)
        return Running(begins + at, record, season_s=season_s)

    before, after = begun(420), begun(100)
    assert before.seconds(57, low)[PREFILL] >= 2, "nobody has asked for it yet"
    assert after.seconds(57, low)[PREFILL] == 1


def test_a_lull_takes_nobody_away_whom_the_season_wants_again() -> None:
    season_s = 96 * 60.0

    def begun(bins: tuple[float, ...]) -> Running:
        return Running(10_000 * season_s, ScalerRecord(bins=bins, latest_bin=960_000 - 1), season_s=season_s)

    known, unknown = begun((26 * 60.0,) * 3 * 96), begun(())
    assert known.seconds(70, 26.0)[PREFILL] == unknown.seconds(70, 26.0)[PREFILL] == 5
    assert known.seconds(40, 17.0)[PREFILL] == 5
    assert unknown.seconds(40, 17.0)[PREFILL] == 4
    assert known.seconds(40, 10.0)[PREFILL] < 4, "this is no lull any more"


def test_a_schedule_starts_what_sleeps_before_anybody_asks() -> None:
    monday = 1_763_971_200.0  # 2025-11-24 08:00 UTC
    entry = {"days": ["mon"], "begin": "08:00", "end": "09:00", "sizes": {"decode": "2..4"}}
    running = Running(monday - 100.0, schedule=[entry])
    running.sizes = {PREFILL: 1, DECODE: 0}
    assert running.seconds(95)[DECODE] == 0
    assert running.seconds(10)[DECODE] == 2


def test_a_worker_that_never_comes_keeps_nobody_from_going() -> None:
    running = Running()
    running.seconds(60, 20.0)
    grown = dict(running.sizes)
    assert grown[PREFILL] > 2
    running.missing = 1
    assert running.seconds(60, 1.0)[PREFILL] < grown[PREFILL]


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(1, 20)), min_size=1, max_size=12), st.booleans())
def test_any_demand(steps: list[tuple[float, int]], by_gpus: bool) -> None:
    running = Running(gpus=(4, 1), max_gpus=14) if by_gpus else Running(max_workers=10)
    for rate, seconds in steps:
        for _ in range(seconds):
            running.second(rate)
            sizes = running.sizes
            assert 1 <= sizes[PREFILL] <= 8
            assert 0 <= sizes[DECODE] <= 8
            assert (4 * sizes[PREFILL] + sizes[DECODE] <= 14) if by_gpus else sum(sizes.values()) <= 10


@pytest.mark.parametrize("step_s", [-86_400.0, -3600.0, -20.0, 20.0, 3600.0, 86_400.0])
def test_a_clock_that_is_set_changes_nothing_but_what_goes_by_the_time_of_day(step_s: float) -> None:
    """Neither are sizes held for an hour, nor does everything look idle, or everybody gone."""
    usual, stepped = Running(1e6), Running(1e6)
    for second in range(400):
        rate = 20.0 if 60 <= second < 120 else 0.0 if second > 250 else 2.0
        if second == 100:
            stepped.scaler.wall_ahead_s = step_s
        usual.second(rate)
        stepped.second(rate)
        assert stepped.sizes == usual.sizes, second
    assert usual.sizes == {PREFILL: 1, DECODE: 0}, "it grew, shrank, and went to sleep"
    at = [decision.at for decision in stepped.scaler.decisions]
    assert [each - decision.at for each, decision in zip(at, usual.scaler.decisions, strict=True)][-1] == step_s


def test_a_schedule_goes_by_the_clock_that_is_set() -> None:
    monday = 1_763_971_200.0 - 7200.0  # 2025-11-24 06:00 UTC
    running = Running(monday, schedule=[{"begin": "08:00", "end": "09:00", "sizes": {"prefill": "3..8"}}])
    assert running.seconds(20, 2.0)[PREFILL] == 1
    running.scaler.wall_ahead_s = 2.5 * 3600
    assert running.seconds(5, 2.0)[PREFILL] == 3
