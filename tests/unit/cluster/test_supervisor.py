"""The supervisor against scripted processes: lives, restarts, drains, watching, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.launcher import Process, Started
from cluster.records import ClusterRecord
from cluster.supervisor import Supervisor
from configs.schema import ClusterConfig, DecodeConfig, HttpConfig, LimitsConfig, PrefillConfig
from protocol.cluster_view import ClusterView, RolloutPhase, RolloutState, WorkerInfo, WorkerState
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError, WorkerLostError
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


def test_workers_start_and_routers_hear_of_it() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        assert supervisor.view().usable(Role.DECODE) == ()
        await supervisor.settle(5)
        assert [ref.worker_id for ref in supervisor.view().usable(Role.DECODE)] == ["worker-1", "worker-2"]

    supervised(scenario, config(decode=2))


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
    monkeypatch.setattr("cluster.supervisor.STOP_S", 0.05)

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
    monkeypatch.setattr("cluster.supervisor._KILL_AGAIN_S", 0.01)

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


def test_what_a_rolled_back_configuration_did_to_a_worker_is_not_said_of_others() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        refused = config(lease_s=11.0)

        async def start(ref: WorkerRef) -> None:
            if launcher.configs[ref.worker_id, ref.epoch] is refused:
                raise ConfigError("/bad/model: no such file")

        launcher.on_start = start
        await supervisor.start()
        await supervisor.settle(5)
        state = RolloutState(2, RolloutPhase.STARTING, 0.0, (), {}, "")
        supervisor.arrange(lambda pools: pools.begin_revision(refused), state)
        supervisor.arrange(lambda pools: pools.size_revisions({}, {Role.DECODE: 1}), state)
        await seen(supervisor, lambda view: any(info.last_error == "/bad/model: no such file" for info in view.workers))
        launcher.processes["worker-0", 1].die()
        await supervisor.settle(5)
        supervisor.arrange(lambda pools: pools.size_revisions({}, {Role.DECODE: 0}), state)
        await seen(supervisor, lambda view: len(view.workers) == 2)
        over = replace(state, phase=RolloutPhase.ROLLED_BACK)
        supervisor.arrange(lambda pools: pools.end_revision(taken=False), over)
        launcher.processes["worker-1", 1].die()
        await seen(supervisor, lambda view: not all_ready(view))
        await supervisor.settle(5)

    supervised(scenario)


def test_an_unknown_worker_is_not_drained() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="worker-7") as caught:
            supervisor.drain("worker-7", restart=False)
        assert caught.value.param == "worker"

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


def test_changes_that_nobody_can_record_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervisor._SAVE_AGAIN_S", 0.01)

    async def scenario() -> None:
        records = ScriptedRecords()
        supervisor = Supervisor(config(), ScriptedLauncher(), records)
        await supervisor.start()
        await supervisor.settle(5)
        await supervisor.saved()
        records.away, former = 10**6, records.record
        state = RolloutState(2, RolloutPhase.DONE, 0.0, (), {}, "")
        for number in range(100):
            supervisor.arrange(lambda pools: [], replace(state, verdict=f"{number} requests"))
            await asyncio.sleep(0)
        assert len(supervisor._tasks) <= 2
        assert records.record is former
        records.away = 0
        await supervisor.saved()
        assert records.record is not None
        assert records.record.rollout == replace(state, verdict="99 requests")
        records.away = 1
        supervisor.arrange(lambda pools: [], state)
        while records.record.rollout != state:  # noqa: ASYNC110 (nobody is told of a record)
            await asyncio.sleep(0.001)
        await supervisor.close()

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(bounded())


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


def test_a_configuration_error_ends_the_wait_at_once() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def refuse(ref: WorkerRef) -> None:
            raise ConfigError("model.gguf ends before its tensors do", param="model")

        launcher.on_start = refuse
        await supervisor.start()
        with pytest.raises(ConfigError, match="ends before its tensors"):
            await supervisor.settle(5)

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


def test_absurd_sizes_are_refused() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        for workers in (0, 4096):
            with pytest.raises(InvalidRequestError, match=r"decode must be 1 to 64 workers \(decode.max_workers\)"):
                supervisor.scale({Role.DECODE: workers}, anything_fits)

    supervised(scenario)


def test_both_roles_are_scaled_or_none_and_fewer_workers_always_fit() -> None:
    def nothing_fits(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
        raise InvalidRequestError(f"{sum(wanted.values())} workers for {len(asked)} roles")

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        for sizes in ({Role.PREFILL: 2, Role.DECODE: 65}, {Role.PREFILL: 2, Role.DECODE: 0}):
            with pytest.raises(InvalidRequestError, match="decode must be"):
                supervisor.scale(sizes, anything_fits)
        with pytest.raises(InvalidRequestError, match="4 workers for 2 roles"):
            supervisor.scale({Role.PREFILL: 3, Role.DECODE: 1}, nothing_fits)
        assert supervisor.view().wanted == {Role.PREFILL: 1, Role.DECODE: 2}
        supervisor.scale({Role.DECODE: 1}, nothing_fits)
        assert supervisor.view().wanted == {Role.PREFILL: 1, Role.DECODE: 1}

    supervised(scenario, config(decode=2))


def test_routers_are_scaled_with_the_workers_or_not_at_all() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        assert supervisor.view().routers == 1
        known = supervisor.view().version
        supervisor.scale({}, anything_fits, 3)
        view = await supervisor.watch(known)
        assert (view.routers, view.wanted) == (3, {Role.PREFILL: 1, Role.DECODE: 1})
        with pytest.raises(InvalidRequestError, match="decode must be"):
            supervisor.scale({Role.DECODE: 0}, anything_fits, 2)
        assert supervisor.view().routers == 3
        supervisor.scale({Role.DECODE: 2}, anything_fits, 2)
        assert (supervisor.view().routers, supervisor.view().wanted[Role.DECODE]) == (2, 2)

    supervised(scenario)


def test_routers_that_serve_sizes_are_left_to_it() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="max_router_replicas") as refused:
            supervisor.scale({Role.DECODE: 2}, anything_fits, 2)
        assert refused.value.param == "routers"
        assert (supervisor.view().routers, supervisor.view().wanted[Role.DECODE]) == (None, 1)

    supervised(scenario, ClusterConfig(http=HttpConfig(max_router_replicas=4)))


def test_routers_hear_that_the_cluster_ends() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        before = supervisor.view()
        assert not before.stopping
        watching = asyncio.ensure_future(supervisor.watch(before.version))
        await asyncio.sleep(0)
        supervisor.stop_admission()
        assert (await watching).stopping

    supervised(scenario)


def test_a_colocated_cluster_has_decode_workers_only() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        assert [info.role for info in supervisor.view().workers] == [Role.DECODE]
        with pytest.raises(InvalidRequestError) as caught:
            supervisor.scale({Role.PREFILL: 1}, anything_fits)
        assert caught.value.param == "prefill"

    supervised(scenario, ClusterConfig(disaggregation="never", prefill=PrefillConfig(workers=0)))


async def ended(supervisor: Supervisor) -> None:
    """What becomes of a supervisor when its process is killed: it does and says nothing more."""
    supervisor._news = asyncio.Event()
    tasks = [*supervisor._lives.values(), *supervisor._tasks]
    supervisor._processes.clear()
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
            await former.saved()
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


def test_an_order_is_answered_also_where_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervisor._SAVED_S", 0.05)

    async def run() -> None:
        supervisor = Supervisor(config(), ScriptedLauncher(), ScriptedRecords(away=1_000_000))
        async with asyncio.timeout(10):
            await supervisor.start()
            supervisor.scale({Role.DECODE: 2}, anything_fits)
            await supervisor.saved()
            assert supervisor.pools.wanted()[Role.DECODE] == 2
            await supervisor.close()

    asyncio.run(run())


def test_a_successor_takes_up_the_workers_as_they_are() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.scale({Role.DECODE: 3}, anything_fits)
        await supervisor.settle(5)

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert supervisor.view().workers == before.workers
        await supervisor.settle(5)
        await seen(supervisor, lambda view: len(launcher.processes) == 4)
        launcher.processes["worker-3", 1].die()
        view = await seen(supervisor, lambda view: one(view, "worker-3").epoch == 2 and all_ready(view))
        assert [info for info in view.workers if info.worker_id != "worker-3"] == list(before.workers[:-1])

    succeeded(first, second)


def test_a_successor_wants_as_many_routers() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.scale({}, anything_fits, 5)

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert supervisor.view().routers == before.routers == 5

    succeeded(first, second)


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
    monkeypatch.setattr("cluster.supervisor.STOP_S", 0.01)
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
        await supervisor._kill(*life)  # until that is over
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
    monkeypatch.setattr("cluster.supervisor._SAVE_AGAIN_S", 0.0)

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


def test_a_flip_tells_the_worker_and_the_routers() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        known = supervisor.view().version
        supervisor.flip("worker-3", Duty.PREFILL)
        view = await supervisor.watch(known)
        info = one(view, "worker-3")
        assert (info.role, info.term, info.epoch, info.state) == (Role.PREFILL, 1, 1, WorkerState.READY)
        assert view.wanted == {Role.PREFILL: 3, Role.DECODE: 1}
        process = launcher.processes["worker-3", 1]
        await process.told
        assert process.roles == [Duty.PREFILL]
        supervisor.flip("worker-3", Duty.PREFILL)
        assert one(supervisor.view(), "worker-3").term == 1, "it has that role"
        with pytest.raises(InvalidRequestError, match="the only decode worker"):
            supervisor.flip("worker-2", Duty.PREFILL)
        with pytest.raises(InvalidRequestError, match="worker-9") as caught:
            supervisor.flip("worker-9", Duty.PREFILL)
        assert caught.value.param == "worker"
        process.die()
        view = await seen(supervisor, lambda view: one(view, "worker-3").epoch == 2 and all_ready(view))
        assert one(view, "worker-3").role is Role.PREFILL
        assert launcher.processes["worker-3", 2].role is Role.PREFILL

    supervised(scenario, config(prefill=2, decode=2))


def test_scaling_flips_where_one_role_gives_what_the_other_takes() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.scale({Role.PREFILL: 1, Role.DECODE: 4}, anything_fits)
        roles = {info.worker_id: info.role for info in supervisor.view().workers}
        assert roles.pop("worker-4") is Role.DECODE, "one more starts"
        assert roles == {f"worker-{n}": Role.PREFILL if n == 0 else Role.DECODE for n in range(4)}
        await supervisor.settle(5)
        assert sorted(launcher.processes) == [(f"worker-{n}", 1) for n in range(5)], "nobody was started anew"
        supervisor.scale({Role.PREFILL: 2, Role.DECODE: 2}, anything_fits)
        view = await seen(supervisor, lambda view: sum(info.state is WorkerState.READY for info in view.workers) == 4)
        assert [info.worker_id for info in view.workers if info.role is Role.PREFILL] == ["worker-0", "worker-4"]

    supervised(scenario, config(prefill=2, decode=2, drain_s=0.05))


@pytest.mark.parametrize(
    ("name", "value"), [("resources", {"GPU": 1.0}), ("tensor_parallel_size", 2), ("kv_cache_tokens", 512)]
)
def test_workers_that_differ_do_not_flip(name: str, value: Any) -> None:
    settings = config(prefill=2, decode=2, drain_s=0.05)
    settings = settings.model_copy(update={"decode": settings.decode.model_copy(update={name: value})})

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        with pytest.raises(InvalidRequestError, match=rf"prefill\.{name} and decode\.{name} differ"):
            supervisor.flip("worker-3", Duty.PREFILL)
        supervisor.scale({Role.PREFILL: 1, Role.DECODE: 3}, anything_fits)
        view = await seen(supervisor, lambda view: len(view.workers) == 4 and all_ready(view))
        assert all(info.term == 0 for info in view.workers), "it ends one and starts one"

    supervised(scenario, settings)


def test_a_colocated_cluster_has_nobody_to_flip() -> None:
    settings = ClusterConfig(
        disaggregation="never", prefill=PrefillConfig(workers=0), decode=DecodeConfig(workers=2), limits=LimitsConfig()
    )

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="do both"):
            supervisor.flip("worker-1", Duty.PREFILL)

    supervised(scenario, settings)


def test_roles_outlive_the_controller() -> None:
    async def run() -> None:
        records = ScriptedRecords()
        first = Supervisor(config(prefill=2, decode=1), ScriptedLauncher(), records)
        async with asyncio.timeout(10):
            await first.start()
            await first.settle(5)
            first.flip("worker-1", Duty.DECODE)
            await first._save()
            assert records.record is not None
            assert records.record.pools[Role.DECODE].desired == 2
            assert records.record.pools[Role.PREFILL].desired == 1
            launcher = ScriptedLauncher()
            launcher.left = {WorkerLife(f"worker-{n}", 1) for n in range(3)}
            second = Supervisor(config(prefill=2, decode=1), launcher, records)
            await second.start()
            view = await seen(second, all_ready)
            assert {info.worker_id: (info.role, info.term) for info in view.workers} == {
                "worker-0": (Role.PREFILL, 0),
                "worker-1": (Role.DECODE, 1),
                "worker-2": (Role.DECODE, 0),
            }
            await first.close()
            await second.close()

    asyncio.run(run())
