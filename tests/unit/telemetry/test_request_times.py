"""The time ledger: no hole, no overlap, whatever happened and whatever the workers said about themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.request_times import RequestTimes, Stage

seconds = st.floats(0, 5)
Event = tuple[str, float, float]
"""What happens, after how long, and the duration that a worker tells of."""
events = st.lists(
    st.tuples(
        st.sampled_from(["prepared", "admitted", "prefilled", "fetched", "attached", "stepped", "lost"]), seconds, seconds
    ),
    max_size=30,
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def happen(times: RequestTimes, clock: Clock, name: str, after: float, told: float) -> None:
    clock.now += after
    without: dict[str, Callable[[], None]] = {
        "prepared": times.prepared,
        "admitted": lambda: times.admitted("least_queued"),
        "lost": times.lost,
    }
    if name in without:
        without[name]()
    elif name == "fetched":
        times.prefilled(told, told / 2)
    elif name == "stepped":
        times.stepped(clock.now, told)
    else:
        getattr(times, name)(told)


@given(history=events, rest=seconds, finished=st.booleans())
def test_stages_sum_up_and_leave_no_hole(history: list[Event], rest: float, finished: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = Clock(monkeypatch)
        times = RequestTimes(clock.now)
        for event in history:
            happen(times, clock, *event)
        times.finish = clock.now if finished else None
        now = clock.now + rest
    total = now - times.arrival
    assert sum(times.stages(now).values()) == pytest.approx(total, abs=1e-9)
    assert all(spent >= 0 for spent in times.stages(now).values())
    line = times.line(now)
    moments = [times.arrival, *(stretch.end for stretch in line)]
    assert [stretch.start for stretch in line] == moments[:-1]
    assert moments[-1] == (now if total else times.arrival)


def test_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = RequestTimes(clock.now)
    for event in [
        ("prepared", 1.0, 0.0),
        ("admitted", 2.0, 0.0),
        ("prefilled", 8.0, 5.0),
        ("attached", 4.0, 3.0),
        ("stepped", 7.0, 6.0),
        ("stepped", 10.0, 8.0),
        ("stepped", 11.0, 11.5),  # a little longer than the stretch that it lies in
    ]:
        happen(times, clock, *event)
    times.finish = clock.now
    assert times.stages(clock.now + 0.5) == {
        "prepare": 1.0,
        "queue": 2.0,
        "prefill_queue": 3.0,
        "prefill": 5.0,
        "handoff_wait": 1.0,
        "transfer": 3.0,
        "decode_queue": 1.0,
        "decode_step": 25.0,
        "decode_gap": 2.0,
        "send": 0.5,
    }
    assert times.handoff_s == 4.0
    report = times.report(clock.now)
    assert (report["ttft"], report["total"], report["token_gaps"], report["resumes"]) == (11.0, 43.0, [11.0, 10.0, 11.0], 0)
    decode = [stretch for stretch in times.line(clock.now) if stretch.stage is Stage.DECODE_STEP]
    assert [(stretch.start - 100, stretch.end - 100) for stretch in decode] == [(16.0, 43.0)]
    summary = times.summary(clock.now)
    assert (summary["longest_gap_s"], summary["ttft_s"], summary["queue_s"]) == (11.0, 11.0, 2.0)


def test_nothing_is_handed_over_where_decode_computes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = RequestTimes(clock.now)
    happen(times, clock, "prefilled", 2.0, 1.0)
    assert times.handoff_s is None
    times.attached(0.0, handed_over=False)
    assert times.handoff_s is None
    happen(times, clock, "attached", 2.0, 1.0)
    assert times.handoff_s == 2.0, "a later attempt's was"


def test_a_second_attempt_waits_again_and_the_first_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = RequestTimes(clock.now)
    for event in [
        ("admitted", 1.0, 0.0),
        ("prefilled", 2.0, 2.0),
        ("lost", 4.0, 0.0),
        ("admitted", 8.0, 0.0),
        ("prefilled", 3.0, 3.0),
    ]:
        happen(times, clock, *event)
    assert times.stages(clock.now) == {"queue": 9.0, "prefill_queue": 0.0, "prefill": 5.0, "lost": 4.0}
    assert times.first_token == 103.0, "the client has seen only one first token"
    assert times.token_gaps == [15.0], "and has waited for the next one"


def test_what_ends_early_has_lost_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times = RequestTimes(clock.now)
    happen(times, clock, "admitted", 1.0, 0.0)
    assert times.stages(clock.now + 2.0) == {"queue": 1.0, "lost": 2.0}
    assert times.report(clock.now)["ttft"] is None
