"""Lives of workers against scripted processes: starts, ends, restarts, drains, and lives that a successor takes up."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from cluster.supervision.supervisor import Supervisor
from protocol.cluster_view import ClusterView, WorkerState
from protocol.errors import UnavailableError, WorkerLostError
from protocol.messages.workers import Role, WorkerLife, WorkerRef
from tests.unit.cluster.supervision.scripted import (
    ScriptedLauncher,
    ScriptedProcess,
    ScriptedRecords,
    all_ready,
    anything_fits,
    config,
    one,
    seen,
    succeeded,
    supervised,
)


def test_a_dead_worker_comes_back_with_the_next_epoch() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        launcher.processes["worker-1", 1].die()
        view = await seen(supervisor, lambda view: one(view, "worker-1").epoch == 2)
        assert one(view, "worker-1").state is WorkerState.STARTING
        view = await seen(supervisor, all_ready)
        info = one(view, "worker-1")
        assert (info.epoch, info.restarts, info.last_error) == (2, 1, "killed by signal 9")
        assert launcher.processes["worker-1", 1].killed
        assert "worker-1" not in launcher.released, "the placement stays with the worker over its lives"

    supervised(scenario)


def test_a_worker_that_dies_soon_after_each_start_is_not_restarted_at_once_for_ever() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        launcher.processes["worker-1", 1].die()
        await seen(supervisor, lambda view: one(view, "worker-1").epoch == 2 and all_ready(view))
        launcher.processes["worker-1", 2].die()
        view = await seen(supervisor, lambda view: one(view, "worker-1").epoch == 3)
        info = one(view, "worker-1")
        assert (info.state, info.quick_ends, info.start_delay_s) == (WorkerState.STARTING, 2, 1.0)

    supervised(scenario)


def test_scaling_down_lets_running_work_finish_then_ends_the_worker() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.scale({Role.DECODE: 1}, anything_fits)
        process = launcher.processes["worker-2", 1]
        view = await seen(supervisor, lambda view: one(view, "worker-2").state is WorkerState.DRAINING)
        assert [ref.worker_id for ref in view.usable(Role.DECODE)] == ["worker-1"]
        assert not process.stopped
        process.idle.set()
        await seen(supervisor, lambda view: len(view.workers) == 2)
        await launcher.release_seen.wait()
        assert (process.stopped, process.killed) == (True, True)
        assert launcher.released == ["worker-2"]

    supervised(scenario, config(decode=2))


def test_what_a_worker_occupied_is_given_back_though_that_fails_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.lives._RELEASE_AGAIN_S", 0.01)

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        launcher.failing_releases = 2
        launcher.processes["worker-2", 1].idle.set()
        supervisor.scale({Role.DECODE: 1}, anything_fits)
        await launcher.release_seen.wait()
        assert (launcher.failing_releases, launcher.released) == (0, ["worker-2"])

    supervised(scenario, config(decode=2))


def test_another_life_has_what_was_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.lives._RELEASE_AGAIN_S", 0.01)

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        launcher.failing_releases = 10**6
        launcher.processes["worker-2", 1].idle.set()
        supervisor.scale({Role.DECODE: 1}, anything_fits)
        while launcher.failing_releases == 10**6:  # noqa: ASYNC110 (nobody is told of a failure)
            await asyncio.sleep(0)
        supervisor.scale({Role.DECODE: 2}, anything_fits)
        await seen(supervisor, all_ready)
        launcher.failing_releases = 0
        await asyncio.sleep(0.05)
        assert (one(supervisor.view(), "worker-2").epoch, launcher.released) == (2, [])

    supervised(scenario, config(decode=2))


def test_a_drain_ends_at_its_deadline() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.scale({Role.PREFILL: 1}, anything_fits)
        await seen(supervisor, lambda view: len(view.workers) == 2)

    supervised(scenario, config(prefill=2, drain_s=0.05))


def test_a_restart_waits_for_the_drain_and_keeps_the_id() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.drain("worker-1", restart=True)
        view = supervisor.view()
        assert (one(view, "worker-1").state, view.usable(Role.DECODE)) == (WorkerState.DRAINING, ())
        launcher.processes["worker-1", 1].idle.set()
        view = await seen(supervisor, all_ready)
        assert one(view, "worker-1").epoch == 2
        assert launcher.processes["worker-1", 1].stopped
        assert launcher.released == []

    supervised(scenario)


def test_a_worker_that_does_not_stop_is_killed_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.lives.STOP_S", 0.05)

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        process = launcher.processes["worker-1", 1]

        async def deaf() -> None:
            return None

        async def kill() -> None:
            process.killed = True
            if not process._end.done():
                process.die()

        process.stop, process.kill = deaf, kill  # type: ignore[method-assign]
        process.idle.set()
        supervisor.drain("worker-1", restart=True)
        view = await seen(supervisor, lambda view: one(view, "worker-1").epoch == 2 and all_ready(view))
        assert one(view, "worker-1").restarts == 1

    supervised(scenario)


@pytest.mark.parametrize("failures", [1, 1000])
def test_a_worker_whose_kill_fails_has_a_next_life_all_the_same(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.lives._KILL_AGAIN_S", 0.01)

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        process, attempts = launcher.processes["worker-1", 1], 0

        async def kill() -> None:
            nonlocal attempts
            attempts += 1
            process.killed = True  # as far as the checks of this test go
            if attempts <= failures:
                raise RuntimeError("can't start new thread")

        process.kill = kill  # type: ignore[method-assign]
        process.die()
        view = await seen(supervisor, lambda view: one(view, "worker-1").epoch == 2 and all_ready(view))
        assert one(view, "worker-1").last_error == "killed by signal 9"
        assert attempts == min(failures + 1, 5)

    supervised(scenario)


def test_scaling_down_a_starting_worker_ends_it_at_once() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def never_prefill(ref: WorkerRef) -> None:
            if ref.worker_id == "worker-1":
                await asyncio.Event().wait()

        launcher.on_start = never_prefill
        await supervisor.start()
        view = await seen(supervisor, lambda view: len(view.usable(Role.PREFILL)) == 1)
        supervisor.scale({Role.PREFILL: 1}, anything_fits)
        view = await seen(supervisor, all_ready)
        assert {info.worker_id for info in view.workers} == {"worker-0", "worker-2"}
        supervisor.scale({Role.PREFILL: 2}, anything_fits)
        launcher.on_start = launcher._at_once
        view = await seen(supervisor, all_ready)
        assert one(view, "worker-1").epoch == 2

    supervised(scenario, config(prefill=2))


def test_a_worker_that_does_not_start_in_time_says_what_is_missing() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def never(ref: WorkerRef) -> None:
            await asyncio.Event().wait()

        launcher.on_start = never
        await supervisor.start()
        view = await seen(supervisor, lambda view: one(view, "worker-1").last_error is not None)
        assert "no node has room for decode" in str(one(view, "worker-1").last_error)
        with pytest.raises(UnavailableError, match="worker-1: did not start within"):
            await supervisor.settle(0.01)

    supervised(scenario, config(worker_start_s=0.05))


@pytest.mark.parametrize("error", [WorkerLostError("out of memory"), RuntimeError("a bug")])
def test_a_failed_start_is_tried_again(error: Exception) -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def fail_once(ref: WorkerRef) -> None:
            if ref.worker_id == "worker-1" and ref.epoch == 1:
                raise error

        launcher.on_start = fail_once
        await supervisor.start()
        await supervisor.settle(5)
        assert one(supervisor.view(), "worker-1").epoch == 2

    supervised(scenario)


def test_a_worker_that_is_wanted_again_waits_until_its_former_life_is_killed() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        being_killed, may_end = asyncio.Event(), asyncio.Event()

        async def start(ref: WorkerRef) -> None:
            if (ref.worker_id, ref.epoch) == ("worker-2", 1):
                process = launcher.processes["worker-2", 1]
                process.kill = partial(kill, process)  # type: ignore[method-assign]
                raise WorkerLostError("its start failed")

        async def kill(process: ScriptedProcess) -> None:
            being_killed.set()
            await may_end.wait()
            process.killed = True

        launcher.on_start = start
        await supervisor.start()
        await being_killed.wait()
        supervisor.scale({Role.DECODE: 1}, anything_fits)
        await asyncio.sleep(0)  # the removal is under way
        supervisor.scale({Role.DECODE: 2}, anything_fits)
        for _ in range(20):
            await asyncio.sleep(0)
        assert ("worker-2", 2) not in launcher.processes
        may_end.set()
        view = await seen(supervisor, all_ready)
        assert one(view, "worker-2").epoch == 2
        assert not launcher.processes["worker-2", 1].alive

    supervised(scenario, config(decode=2))


def test_a_worker_that_dies_while_draining_is_not_restarted() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.scale({Role.DECODE: 1}, anything_fits)
        launcher.processes["worker-2", 1].die()
        view = await seen(supervisor, lambda view: len(view.workers) == 2)
        assert all_ready(view)
        assert ("worker-2", 2) not in launcher.processes

    supervised(scenario, config(decode=2))


def test_a_worker_that_died_meanwhile_is_replaced() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        launcher.processes["worker-1", 1].killed = True

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        view = await seen(supervisor, lambda view: one(view, "worker-1").epoch == 2 and all_ready(view))
        assert one(view, "worker-1").last_error == "it ended while the controller was away"

    succeeded(first, second)


def test_a_life_that_was_starting_begins_anew_and_what_is_left_of_it_goes() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        begun = asyncio.Event()

        async def never(ref: WorkerRef) -> None:
            begun.set()
            await asyncio.Event().wait()

        launcher.on_start = never
        supervisor.scale({Role.DECODE: 2}, anything_fits)
        await begun.wait()

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert ("worker-2", 1) not in launcher.left
        view = await seen(supervisor, all_ready)
        assert [(info.worker_id, info.epoch) for info in view.workers] == [("worker-0", 1), ("worker-1", 1), ("worker-2", 2)]

    succeeded(first, second)


def test_a_successor_hears_of_the_end_of_a_worker_that_was_killed_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former supervisor ends before the pool has heard of it."""
    monkeypatch.setattr("cluster.supervision.lives.STOP_S", 0.01)
    life = WorkerLife("worker-1", 1)

    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        process, being_killed = launcher.processes[life], asyncio.Event()

        async def deaf() -> None:
            return None

        async def kill() -> None:
            process.killed = True
            being_killed.set()

        process.stop, process.kill = deaf, kill  # type: ignore[method-assign]
        process.idle.set()
        supervisor.drain("worker-1", restart=True)
        await being_killed.wait()
        await supervisor.lives._kill(life)  # until that is over
        supervisor.scale({Role.PREFILL: 1}, anything_fits)  # something to record

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert life not in launcher.left
        view = await seen(supervisor, all_ready)
        assert one(view, "worker-1").epoch == 2

    succeeded(first, second)


@pytest.mark.parametrize("restart", [True, False])
def test_a_drain_goes_on_under_a_successor(restart: bool) -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.drain("worker-2", restart=restart)

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert one(supervisor.view(), "worker-2").state is WorkerState.DRAINING
        await seen(supervisor, lambda view: ("worker-2", 1) in launcher.processes)
        launcher.processes["worker-2", 1].idle.set()
        view = await seen(supervisor, all_ready)
        assert [(info.worker_id, info.epoch) for info in view.workers if info.role is Role.DECODE] == (
            [("worker-1", 1), ("worker-2", 2)] if restart else [("worker-1", 1)]
        )

    succeeded(first, second, config(decode=2))


def test_a_drain_waits_until_its_worker_is_taken_up(caplog: pytest.LogCaptureFixture) -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        return None

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert not launcher.processes
        supervisor.drain("worker-2", restart=False)
        await seen(supervisor, lambda view: ("worker-2", 1) in launcher.processes)
        launcher.processes["worker-2", 1].idle.set()
        await seen(supervisor, lambda view: len(view.workers) == 2)

    succeeded(first, second, config(decode=2))
    assert "a supervision task failed" not in caplog.text


def test_no_life_begins_before_its_epoch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.recorder._SAVE_AGAIN_S", 0.0)

    async def run() -> None:
        launcher, records = ScriptedLauncher(), ScriptedRecords(away=3)

        async def recorded(ref: WorkerRef) -> None:
            assert records.record is not None
            assert records.record.epochs[ref.worker_id] == ref.epoch

        launcher.on_start = recorded
        supervisor = Supervisor(config(), launcher, records)
        async with asyncio.timeout(10):
            await supervisor.start()
            await supervisor.settle(5)
            launcher.processes["worker-1", 1].die()
            view = await seen(supervisor, lambda view: one(view, "worker-1").epoch > 1 and all_ready(view))
            assert [info.epoch for info in view.workers] == [1, 2], "no start failed"
            await supervisor.close()

    asyncio.run(run())
