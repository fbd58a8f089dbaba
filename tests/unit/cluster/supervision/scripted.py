"""Processes, a launcher and a store of records that do what a test says, and whole supervisors over them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from cluster.launcher import Process, Started
from cluster.records import ClusterRecord
from cluster.supervision.supervisor import Supervisor
from configs.schema import ClusterConfig, DecodeConfig, LimitsConfig, PrefillConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.errors import UnavailableError, WorkerLostError
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef


class ScriptedProcess:
    """Does what the test says; remembers what was done to it."""

    def __init__(self, launcher: ScriptedLauncher, role: Role, worker_id: str, epoch: int) -> None:
        self.role = role
        self.ref = WorkerRef(worker_id, epoch, f"tcp://127.0.0.1:{epoch}")
        self._launcher = launcher
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.roles: list[Duty] = []
        """The roles that it was told."""
        self.started = False
        self.stopped = False
        self.killed = False

    @property
    def names(self) -> tuple[str, ...]:
        return (f"process-{self.ref.worker_id}-{self.ref.epoch}",)

    async def start(self) -> Started:
        assert not any(other.alive for other in self._launcher.lives_of(self.ref.worker_id) if other is not self)
        await self._launcher.on_start(self.ref)
        self.started = True
        return Started(self.ref, pids=(self.ref.epoch,), node="127.0.0.1")

    async def resume(self, names: Sequence[str]) -> None:
        assert tuple(names) == self.names
        if (self.ref.worker_id, self.ref.epoch) not in self._launcher.left:
            raise WorkerLostError("it ended while the controller was away")
        self.started = True

    async def run(self) -> None:
        await asyncio.shield(self._end)

    async def drain(self) -> None:
        await self.idle.wait()

    async def take_role(self, duty: Duty) -> None:
        self.roles.append(duty)
        if not self.told.done():
            self.told.set_result(None)

    async def stop(self) -> None:
        assert self.started, "there is nobody to ask"
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
        self.configs: dict[tuple[str, int], ClusterConfig] = {}
        self.released: list[str] = []
        self.failing_releases = 0
        """So many of them fail, the next ones first."""
        self.release_seen = asyncio.Event()
        self.left: set[WorkerLife] = set()
        """Lives that a former supervisor's end has left; with `take_up` only those that are recorded stay."""
        self.on_start: Callable[[WorkerRef], Awaitable[None]] = self._at_once

    async def _at_once(self, ref: WorkerRef) -> None:
        return None

    def lives_of(self, worker_id: str) -> list[ScriptedProcess]:
        return [process for (name, _), process in self.processes.items() if name == worker_id]

    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Process:
        self.configs[worker_id, epoch] = config
        process = self.processes[worker_id, epoch] = ScriptedProcess(self, role, worker_id, epoch)
        return process

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        self.left &= lives.keys()
        assert {worker_id for worker_id, _ in lives} <= set(worker_ids)

    async def release(self, worker_id: str) -> None:
        assert not any(process.alive for process in self.lives_of(worker_id))
        if self.failing_releases:
            self.failing_releases -= 1
            raise RuntimeError("the head does not answer")
        self.released.append(worker_id)
        self.release_seen.set()

    async def why_not_started(self, role: Role) -> str:
        return f"no node has room for {role.value}"


class ScriptedRecords:
    """In memory; away for the first `away` saves."""

    def __init__(self, away: int = 0) -> None:
        self.record: ClusterRecord | None = None
        self.away = away

    async def load(self) -> ClusterRecord | None:
        return self.record

    async def save(self, record: ClusterRecord) -> None:
        await asyncio.sleep(0)
        if self.away:
            self.away -= 1
            raise UnavailableError("the GCS does not answer")
        self.record = record


def config(prefill: int = 1, decode: int = 1, **limits: Any) -> ClusterConfig:
    return ClusterConfig(
        prefill=PrefillConfig(workers=prefill), decode=DecodeConfig(workers=decode), limits=LimitsConfig(**limits)
    )


def supervised(
    scenario: Callable[[Supervisor, ScriptedLauncher], Coroutine[Any, Any, None]], settings: ClusterConfig | None = None
) -> None:
    """Run a scenario and check that the end leaves nothing alive and nothing held."""

    async def run() -> None:
        launcher = ScriptedLauncher()
        supervisor = Supervisor(settings or config(), launcher, ScriptedRecords())
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


def anything_fits(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
    """A check of the room for workers that finds enough."""


def one(view: ClusterView, worker_id: str) -> WorkerInfo:
    (info,) = (info for info in view.workers if info.worker_id == worker_id)
    return info


def all_ready(view: ClusterView) -> bool:
    return all(info.state is WorkerState.READY for info in view.workers)


async def ended(supervisor: Supervisor) -> None:
    """What becomes of a supervisor when its process is killed: it does and says nothing more."""
    supervisor._news = asyncio.Event()
    tasks = list(supervisor._tasks)
    supervisor.lives._processes.clear()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def succeeded(
    first: Callable[[Supervisor, ScriptedLauncher], Coroutine[Any, Any, None]],
    second: Callable[[Supervisor, ScriptedLauncher, ClusterView], Coroutine[Any, Any, None]],
    settings: ClusterConfig | None = None,
) -> None:
    """A supervisor is killed at the end of the first scenario; the second one is its successor's, who gets its last view."""

    async def run() -> None:
        records, launchers = ScriptedRecords(), (ScriptedLauncher(), ScriptedLauncher())
        async with asyncio.timeout(10):
            former = Supervisor(settings or config(), launchers[0], records)
            await former.start()
            await former.settle(5)
            await first(former, launchers[0])
            await former.recorder.saved()
            view = former.view()
            await ended(former)
            launchers[1].left = {WorkerLife(*life) for life, process in launchers[0].processes.items() if process.alive}
            supervisor = Supervisor(settings or config(), launchers[1], records)
            await supervisor.start()
            assert supervisor.view().version > view.version
            await second(supervisor, launchers[1], view)
            await supervisor.close()
        assert not any(process.alive for process in launchers[1].processes.values())

    asyncio.run(run())
