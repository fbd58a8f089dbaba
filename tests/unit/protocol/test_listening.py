"""Silence is judged by the time in which somebody listened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.endpoint import Listening

LEASE_S = 10.0
gaps = st.one_of(st.floats(0.1, LEASE_S / 2), st.floats(LEASE_S, 1000))
"""Seconds between two looks: some heartbeats, and some that this process was held."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(gaps, min_size=1, max_size=60))
def test_a_peer_that_speaks_is_not_silent_whatever_holds_the_listener(looks: list[float]) -> None:
    """What it says while this process is held is heard after the first look behind that."""
    clock = Clock()
    listening, heard_at = Listening(LEASE_S, clock), clock.now
    for gap in looks:
        clock.now += gap
        listening.look()
        assert listening.silent_s(heard_at) < LEASE_S
        heard_at = clock.now


@given(st.floats(0.1, LEASE_S / 2), st.floats(0, 1e6))
def test_a_silent_peer_is_found_within_a_lease_and_a_beat(heartbeat_s: float, before_s: float) -> None:
    clock = Clock()
    listening = Listening(LEASE_S, clock)
    heard_at = clock.now + before_s
    clock.now = heard_at
    listening.look()
    while listening.silent_s(heard_at) < LEASE_S:
        clock.now += heartbeat_s
        listening.look()
    assert LEASE_S <= clock.now - heard_at <= LEASE_S + heartbeat_s + 1e-6


def test_after_a_gap_a_silent_peer_has_one_whole_lease() -> None:
    clock = Clock()
    listening, heard_at = Listening(LEASE_S, clock), clock.now
    clock.now += 100
    listening.look()
    assert listening.silent_s(heard_at) == listening.listened_s == 0
    clock.now += LEASE_S / 2
    listening.look()
    clock.now += LEASE_S / 2
    listening.look()
    assert listening.silent_s(heard_at) == listening.listened_s == LEASE_S
