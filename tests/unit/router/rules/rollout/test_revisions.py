"""Whose workers compute a request during a rollout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.cluster_view import ClusterView, RolloutPhase, RolloutState
from protocol.trace import TraceContext, new_trace
from router.rules.rollout.meter import RolloutMeter
from router.rules.rollout.revisions import place_of, revisions_for

BOTH = frozenset((1, 2))


def during(phase: RolloutPhase, share: float) -> ClusterView:
    return ClusterView(1, (), rollout=RolloutState(2, phase, share, (), {}, ""))


def traces(number: int) -> list[TraceContext]:
    return [new_trace() for _ in range(number)]


def test_without_a_rollout_there_is_one_revision() -> None:
    view = ClusterView(1, (), revision=3)
    assert revisions_for(view, new_trace(), again=False, ready=BOTH) == (3,)
    over = replace(during(RolloutPhase.DONE, 0.5), revision=2)
    assert revisions_for(over, new_trace(), again=False, ready=BOTH) == (2,)


def test_the_share_of_requests_tries_the_new_workers_and_falls_back() -> None:
    found = [revisions_for(during(RolloutPhase.CANARY, 0.1), trace, again=False, ready=BOTH) for trace in traces(5000)]
    assert set(found) == {(2, 1), (1,)}
    assert 0.07 < found.count((2, 1)) / len(found) < 0.13


def test_the_same_request_goes_the_same_way() -> None:
    for trace in traces(100):
        assert place_of(trace) == place_of(replace(trace, state="other", parent_id=""))


@given(st.sampled_from([each for each in RolloutPhase if not each.is_over]), st.floats(0.0, 1.0))
def test_what_has_failed_goes_to_the_known_workers_first(phase: RolloutPhase, share: float) -> None:
    assert revisions_for(during(phase, share), new_trace(), again=True, ready=BOTH)[0] == 1


@pytest.mark.parametrize("phase", [RolloutPhase.STARTING, RolloutPhase.ROLLING_BACK])
def test_nobody_goes_to_new_workers_that_are_not_wanted_unless_there_are_no_others(phase: RolloutPhase) -> None:
    assert revisions_for(during(phase, 0.0), new_trace(), again=False, ready=BOTH) == (1,)
    assert revisions_for(during(phase, 0.0), new_trace(), again=False, ready=frozenset((2,))) == (1, 2)


def test_while_workers_are_replaced_either_takes_what_the_other_has_no_room_for() -> None:
    found = {revisions_for(during(RolloutPhase.REPLACING, 0.5), trace, again=False, ready=BOTH) for trace in traces(100)}
    assert found == {(2, 1), (1, 2)}


def test_a_meter_counts_each_attempt_once_in_the_end() -> None:
    meter = RolloutMeter(2)
    good, failing, left, known = (meter.begin(revision, 10.0) for revision in (2, 2, 2, 1))
    assert sum(meter.observation("r", 13.0).new.unanswered) == 3
    for watched in (good, known):
        watched.tokens(1, 10.5)
        watched.tokens(10, 11.5)
    running = meter.observation("r", 12.0)
    assert (sum(running.new.first_tokens), sum(running.new.running_paces)) == (1, 1)
    failing.failed = True
    for watched in (good, failing, left, known):
        meter.over(watched, ended=watched in (good, known))
        meter.over(watched, ended=True)
    seen = meter.observation("r", 20.0)
    assert (seen.revision, seen.new.requests, seen.new.failures, sum(seen.new.first_tokens)) == (2, 3, 1, 1)
    assert (sum(seen.new.paces), sum(seen.new.unanswered), sum(seen.new.running_paces)) == (1, 0, 0)
    assert (seen.current.requests, seen.current.failures, sum(seen.current.first_tokens), sum(seen.current.paces)) == (
        1,
        0,
        1,
        1,
    )
