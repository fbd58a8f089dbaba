"""Streams of workers that drain: where they go, and what those that can't move cost their router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.schema import ClusterConfig
from protocol.errors import OverloadedError
from protocol.messages.workers import Duty
from protocol.sampling import SamplingParams
from router.dispatch.claim import Claim
from router.dispatch.journal import Journal
from router.dispatch.links import WorkerLink
from router.dispatch.migrator import Migrator
from router.dispatch.reservation import Room, reserve
from router.dispatch.running import Running
from router.rules.worker_load import Outstanding
from tests.unit.simulated_time import run_in_simulated_time

STREAMS = 8


def _any(**values: Any) -> Any:
    return SimpleNamespace(**values)


def test_a_drain_for_which_nobody_has_room_is_not_looked_at_with_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty load reports in a second."""
    looked: list[Running] = []

    async def scenario() -> None:
        leaving: Any = object()
        roster = _any(to_empty=lambda: [leaving], successors=lambda *args: iter(()), ready_decode=lambda worker_id: None)
        migrator = Migrator(ClusterConfig(), roster, _any())
        need_blocks = migrator._need_blocks

        def noted(running: Running) -> int:
            looked.append(running)
            return need_blocks(running)

        monkeypatch.setattr(migrator, "_need_blocks", noted)
        for _ in range(STREAMS):
            journal = Journal(tuple(range(100)), SamplingParams(seed=1, max_tokens=50), "", emitted=[1, 2])
            migrator._running.add(Running(_any(decode=leaving, ended=False), journal))
        for _ in range(20):
            await migrator._empty_draining()
            await asyncio.sleep(0.05)

    run_in_simulated_time(scenario())
    assert STREAMS <= len(looked) <= 5 * STREAMS


class Idle:
    """A worker with room for ten streams, which answers nothing."""

    def __init__(self) -> None:
        self.claims = Outstanding()
        self.calls = self

    async def reserve(self, build: object, patience_s: float) -> Any:
        await asyncio.sleep(math.inf)

    @property
    def num_free(self) -> int:
        return 100 - self.claims.unreported_size


class Leaving:
    """A worker that drains."""

    ref = _any(worker_id="leaves")
    duty = Duty.DECODE


class Moving:
    """A claim that moves as far as to ask for room."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode
        self.ended = False

    async def move(self, target: Any, journal: Journal, num_blocks: int, patience_s: float, on_gap: object) -> None:
        await reserve(target, "attempt", journal, Room(journal.token_ids, 1, num_blocks), patience_s)


def _draining(monkeypatch: pytest.MonkeyPatch, num_streams: int, idle: list[Idle]) -> Migrator:
    """Streams of ten blocks each at a worker that drains, beside idle ones."""

    def successors(link: object, need_blocks: int) -> Iterator[Idle]:
        return iter(sorted((each for each in idle if each.num_free >= need_blocks), key=lambda each: -each.num_free))

    leaving = Leaving()
    metrics = _any(migration_pause=_any(observe=None), migrated=lambda reason, outcome: None)
    migrator = Migrator(ClusterConfig(), _any(to_empty=lambda: [leaving], successors=successors), metrics)
    monkeypatch.setattr(migrator, "_need_blocks", lambda running: 10)
    for _ in range(num_streams):
        journal = Journal(tuple(range(100)), SamplingParams(seed=1, max_tokens=50), "", emitted=[1, 2])
        migrator._running.add(Running(cast(Claim, Moving(leaving)), journal))
    return migrator


def test_the_streams_of_a_draining_worker_go_to_all_that_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        idle = [Idle() for _ in range(3)]
        migrator = _draining(monkeypatch, 30, idle)
        await migrator._empty_draining()
        await asyncio.sleep(0)
        assert [each.claims.in_flight for each in idle] == [10] * 3
        await migrator.close()

    run_in_simulated_time(scenario())


def test_a_stream_that_ends_while_others_find_their_places_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        idle = Idle()
        migrator = _draining(monkeypatch, 2, [idle])
        looking = asyncio.create_task(migrator._empty_draining())
        await asyncio.sleep(0)
        [left] = [running for running in migrator._running if running.sending is None]
        migrator._running.discard(left)
        await looking
        assert left.sending is None
        assert idle.claims.in_flight == 1
        await migrator.close()

    run_in_simulated_time(scenario())


@pytest.mark.parametrize(("failures", "pause_s"), [(0, 0.25), (4, 4.0), (5, 8.0), (5000, 8.0)])
def test_a_stream_that_can_not_be_moved_is_tried_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch, failures: int, pause_s: float
) -> None:
    """However often its moves have failed."""

    async def scenario() -> None:
        migrator = _draining(monkeypatch, 1, [])
        [running] = migrator._running
        running.failures = failures

        async def full(*args: object) -> None:
            raise OverloadedError("no room")

        monkeypatch.setattr(running.claim, "move", full)
        await migrator._move(running, cast(WorkerLink, Idle()), 10, "drain")
        assert (running.failures, running.retry_at) == (failures + 1, pause_s)

    run_in_simulated_time(scenario())


def test_a_look_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[float] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def to_empty() -> list[WorkerLink]:
            looks.append(loop.time())
            raise KeyError("a bug")

        async def next_change(seen: int, deadline: float) -> None:
            await asyncio.sleep(deadline - loop.time())

        roster = _any(changes=0, to_empty=to_empty, next_change=next_change, ready=lambda role: ())
        migrator = Migrator(ClusterConfig(), roster, _any())
        migrator.start()
        await asyncio.sleep(9)
        await migrator.close()

    run_in_simulated_time(scenario())
    assert 3 <= len(looks) <= 10, "again and again, with a pause"
    assert "a bug" in caplog.text
