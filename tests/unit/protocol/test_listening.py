"""Silence is judged by the time in which somebody listened."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.endpoint import Listening, answer_within
from tests.unit.simulated_time import run_in_simulated_time

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


@pytest.mark.parametrize("held_after_s", [0.01, 0.35])
def test_an_answer_that_came_while_this_process_was_held_is_heard(held_after_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        threading.Timer(held_after_s + 0.05, loop.call_soon_threadsafe, (answer.set_result, "yes")).start()
        loop.call_later(held_after_s, time.sleep, 0.6)
        assert await answer_within(0.4, answer) == "yes"

    asyncio.run(main())


def test_an_answer_is_waited_for_no_longer_than_its_patience() -> None:
    async def main() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await answer_within(2.0, never)
        assert never.cancelled()
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    run_in_simulated_time(main())


def test_a_process_that_is_held_all_the_time_does_not_wait_for_ever() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def hold() -> None:
            time.sleep(0.02)
            loop.call_soon(hold)

        loop.call_soon(hold)
        with pytest.raises(TimeoutError):
            await answer_within(0.04, loop.create_future())

    asyncio.run(main())


def test_an_answer_may_be_an_error() -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(answer_within(1.0, fail()))
