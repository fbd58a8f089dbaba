"""The supervisor against scripted processes: lives, restarts, drains, watching, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cluster.supervisor import Process, Started, Supervisor
from configs.schema import ClusterConfig, DecodeConfig, LimitsConfig, PrefillConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError, WorkerLostError
from protocol.messages import Role, WorkerRef


class ScriptedProcess:
    """Does what the test says; remembers what was done to it."""

    def __init__(self, launcher: ScriptedLauncher, role: Role, worker_id: str, epoch: int) -> None:
        self.ref = WorkerRef(worker_id, epoch, role, f"tcp://127.0.0.1:{epoch}")
        self._launcher = launcher
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.stopped = False
        self.killed = False

    async def start(self) -> Started:
        assert not any(other.alive for other in self._launcher.lives_of(self.ref.worker_id) if other is not self)
        await self._launcher.on_start(self.ref)
        return Started(self.ref, pids=(self.ref.epoch,), node="127.0.0.1")

    async def run(self) -> None:
        await asyncio.shield(self._end)

    async def drain(self) -> None:
        await self.idle.wait()

    async def stop(self) -> None:
        self.stopped = True
        if not self._end.done():
            self._end.set_result(None)

    async def kill(self) -> None:
        await asyncio.sleep(0)
        self.killed = True

    def die(self) -> None:
        self._end.set_exception(WorkerLostError("killed by signal 9"))

    @property
    def alive(self) -> bool:
        return not self.killed


class ScriptedLauncher:
    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], ScriptedProcess] = {}
        self.released: list[str] = []
        self.release_seen = asyncio.Event()
        self.on_start: Callable[[WorkerRef], Awaitable[None]] = self._at_once

    async def _at_once(self, ref: WorkerRef) -> None:
        return None

    def lives_of(self, worker_id: str) -> list[ScriptedProcess]:
        return [process for (name, _), process in self.processes.items() if name == worker_id]

    def process(self, role: Role, worker_id: str, epoch: int) -> Process:
        process = self.processes[worker_id, epoch] = ScriptedProcess(self, role, worker_id, epoch)
        return process

    async def release(self, worker_id: str) -> None:
        assert not any(process.alive for process in self.lives_of(worker_id))
        self.released.append(worker_id)
        self.release_seen.set()

    async def why_not_started(self, role: Role) -> str:
        return f"no node has room for {role.value}"


def config(prefill: int = 1, decode: int = 1, **limits: float) -> ClusterConfig:
    return ClusterConfig(
        prefill=PrefillConfig(workers=prefill), decode=DecodeConfig(workers=decode), limits=LimitsConfig(**limits)
    )


def supervised(
    scenario: Callable[[Supervisor, ScriptedLauncher], Coroutine[Any, Any, None]], settings: ClusterConfig | None = None
) -> None:
    """Run a scenario and check that the end leaves nothing alive and nothing held."""

    async def run() -> None:
        launcher = ScriptedLauncher()
        supervisor = Supervisor(settings or config(), launcher)
        async with asyncio.timeout(10):
            await scenario(supervisor, launcher)
            names = {info.worker_id for info in supervisor.view().workers}
            await supervisor.close()
        assert not any(process.alive for process in launcher.processes.values())
        assert names <= set(launcher.released)

    asyncio.run(run())


async def seen(supervisor: Supervisor, wanted: Callable[[ClusterView], bool]) -> ClusterView:
    """Watch, as a router does, until the view is as wanted."""
    view = supervisor.view()
    while not wanted(view):
        view = await supervisor.watch(view.version)
    return view


def one(view: ClusterView, worker_id: str) -> WorkerInfo:
    (info,) = (info for info in view.workers if info.worker_id == worker_id)
    return info


def all_ready(view: ClusterView) -> bool:
    return all(info.state is WorkerState.READY for info in view.workers)


def test_workers_start_and_routers_hear_of_it() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        assert supervisor.view().usable(Role.DECODE) == ()
        await supervisor.settle(5)
        assert [ref.worker_id for ref in supervisor.view().usable(Role.DECODE)] == ["decode-0", "decode-1"]

    supervised(scenario, config(decode=2))


def test_a_dead_worker_comes_back_with_the_next_epoch() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        await supervisor.settle(5)
        launcher.processes["decode-0", 1].die()
        view = await seen(supervisor, lambda view: one(view, "decode-0").epoch == 2)
        assert one(view, "decode-0").state is WorkerState.STARTING
        view = await seen(supervisor, all_ready)
        info = one(view, "decode-0")
        assert (info.epoch, info.restarts, info.last_error) == (2, 1, "killed by signal 9")
        assert launcher.processes["decode-0", 1].killed
        assert "decode-0" not in launcher.released, "the placement stays with the worker over its lives"

    supervised(scenario)


def test_scaling_down_lets_running_work_finish_then_ends_the_worker() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        await supervisor.settle(5)
        supervisor.scale(Role.DECODE, 1)
        process = launcher.processes["decode-1", 1]
        view = await seen(supervisor, lambda view: one(view, "decode-1").state is WorkerState.DRAINING)
        assert [ref.worker_id for ref in view.usable(Role.DECODE)] == ["decode-0"]
        assert not process.stopped
        process.idle.set()
        await seen(supervisor, lambda view: len(view.workers) == 2)
        await launcher.release_seen.wait()
        assert process.stopped
        assert process.killed
        assert launcher.released == ["decode-1"]

    supervised(scenario, config(decode=2))


def test_a_drain_ends_at_its_deadline() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        await supervisor.settle(5)
        supervisor.scale(Role.PREFILL, 1)
        await seen(supervisor, lambda view: len(view.workers) == 2)

    supervised(scenario, config(prefill=2, drain_s=0.05))


def test_scaling_down_a_starting_worker_ends_it_at_once() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def never_prefill(ref: WorkerRef) -> None:
            if ref.worker_id == "prefill-1":
                await asyncio.Event().wait()

        launcher.on_start = never_prefill
        supervisor.start()
        view = await seen(supervisor, lambda view: len(view.usable(Role.PREFILL)) == 1)
        supervisor.scale(Role.PREFILL, 1)
        view = await seen(supervisor, all_ready)
        assert {info.worker_id for info in view.workers} == {"prefill-0", "decode-0"}
        supervisor.scale(Role.PREFILL, 2)
        launcher.on_start = launcher._at_once
        view = await seen(supervisor, all_ready)
        assert one(view, "prefill-1").epoch == 2

    supervised(scenario, config(prefill=2))


def test_a_worker_that_does_not_start_in_time_says_what_is_missing() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def never(ref: WorkerRef) -> None:
            await asyncio.Event().wait()

        launcher.on_start = never
        supervisor.start()
        view = await seen(supervisor, lambda view: one(view, "decode-0").last_error is not None)
        assert "no node has room for decode" in str(one(view, "decode-0").last_error)
        with pytest.raises(UnavailableError, match="decode-0: did not start within"):
            await supervisor.settle(0.01)

    supervised(scenario, config(worker_start_s=0.05))


@pytest.mark.parametrize("error", [WorkerLostError("out of memory"), RuntimeError("a bug")])
def test_a_failed_start_is_tried_again(error: Exception) -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def fail_once(ref: WorkerRef) -> None:
            if ref.role is Role.DECODE and ref.epoch == 1:
                raise error

        launcher.on_start = fail_once
        supervisor.start()
        await supervisor.settle(5)
        assert one(supervisor.view(), "decode-0").epoch == 2

    supervised(scenario)


def test_a_configuration_error_ends_the_wait_at_once() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def refuse(ref: WorkerRef) -> None:
            raise ConfigError("model.gguf ends before its tensors do", param="model")

        launcher.on_start = refuse
        supervisor.start()
        with pytest.raises(ConfigError, match="ends before its tensors"):
            await supervisor.settle(5)

    supervised(scenario)


def test_a_worker_that_dies_while_draining_is_not_restarted() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        await supervisor.settle(5)
        supervisor.scale(Role.DECODE, 1)
        launcher.processes["decode-1", 1].die()
        view = await seen(supervisor, lambda view: len(view.workers) == 2)
        assert all_ready(view)
        assert ("decode-1", 2) not in launcher.processes

    supervised(scenario, config(decode=2))


def test_absurd_sizes_are_refused() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.start()
        for workers in (0, 4096):
            with pytest.raises(InvalidRequestError, match="1 to 1024"):
                supervisor.scale(Role.DECODE, workers)

    supervised(scenario)
