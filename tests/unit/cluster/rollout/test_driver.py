"""Whole rollouts over the real supervisor, with scripted processes and made-up observations of routers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.memory import WorkerMemory
from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action
from cluster.pools.pools import Pools
from cluster.ray.placement import Room
from cluster.records import ClusterRecord
from cluster.rollout.driver import Rollouts
from cluster.rollout.room import RolloutRoom
from cluster.supervision.supervisor import Supervisor
from configs.schema import ClusterConfig, DecodeConfig, LimitsConfig, PrefillConfig
from protocol.cluster_view import (
    ClusterView,
    RevisionCounts,
    RolloutObservation,
    RolloutOrder,
    RolloutPhase,
    RolloutState,
    WorkerInfo,
    WorkerState,
)
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Role, WorkerLife, WorkerRef
from router.rules.rollout.duration_bins import binned
from tests.unit.cluster.supervision.scripted import ScriptedLauncher, ScriptedProcess, ScriptedRecords, seen

KV_TOKENS = 32_768
ORDER = RolloutOrder({"decode": {"kv_cache_tokens": KV_TOKENS}}, canary=0.2, watch_s=0.01, min_requests=20)
MEMORY = dict.fromkeys(Role, WorkerMemory(kv_pool=10**9, weights=0, process=0))


LARGE = dict.fromkeys(Role, WorkerMemory(kv_pool=2 * 10**9, weights=0, process=0))


@dataclass
class Node:
    """The only node, with the memory of workers as the controller counts it."""

    memory_bytes: float
    counted: Mapping[Role, WorkerMemory] = field(default_factory=lambda: MEMORY)

    def around(self) -> dict[str, Any]:
        """The room of a rollout to large workers."""
        return {"room": self.room, "expect": self.expect, "check": lambda current, new: LARGE}

    async def room(self) -> Room:
        return Room(settings(0), self.counted, [{"CPU": 99.0, "memory": self.memory_bytes}], may_grow=False)

    def expect(self, memory: Mapping[Role, WorkerMemory]) -> None:
        self.counted = memory


class Idle(ScriptedProcess):
    """Has no work: a drain is done at once."""

    async def drain(self) -> None:
        return None


class IdleLauncher(ScriptedLauncher):
    kind: type[Idle] = Idle

    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Idle:
        self.configs[worker_id, epoch] = config
        process = self.kind(self, role, worker_id, epoch)
        self.processes[worker_id, epoch] = process
        return process

    def new_lives(self) -> list[Idle]:
        """Living processes with the new configuration."""
        return [
            process
            for key, process in self.processes.items()
            if self.configs[key].decode.kv_cache_tokens == KV_TOKENS and process.alive and isinstance(process, Idle)
        ]


class Busy(Idle):
    """Has something left to do when it drains."""

    async def drain(self) -> None:
        await asyncio.sleep(0.2)


class BusyLauncher(IdleLauncher):
    kind = Busy


@dataclass
class Rig:
    """A supervised cluster with rollouts. `cores` bound the workers, each of which reserves one."""

    supervisor: Supervisor
    launcher: IdleLauncher
    rollouts: Rollouts
    ended: list[RolloutPhase]

    @property
    def state(self) -> RolloutState:
        state = self.supervisor.rollout
        assert state is not None
        return state

    def observe(self, *, current: RevisionCounts, new: RevisionCounts, router_id: str = "one") -> None:
        self.rollouts.watch.observe(RolloutObservation(router_id, self.state.revision, current, new))

    async def until(self, wanted: Callable[[ClusterView], bool]) -> ClusterView:
        return await seen(self.supervisor, wanted)

    async def phase(self, phase: RolloutPhase) -> ClusterView:
        return await self.until(lambda view: view.rollout is not None and view.rollout.phase is phase)


def settings(cores: int, prefill: int = 1, decode: int = 2, start_s: float = 120.0) -> ClusterConfig:
    resources = {"CPU": 1.0} if cores else {}
    return ClusterConfig(
        disaggregation="auto" if prefill else "never",
        prefill=PrefillConfig(workers=prefill, resources=resources),
        decode=DecodeConfig(workers=decode, resources=resources),
        limits=LimitsConfig(drain_s=5, worker_start_s=start_s),
    )


def rig(supervisor: Supervisor, launcher: IdleLauncher, config: ClusterConfig, cores: int, **around: Any) -> Rig:
    ended: list[RolloutPhase] = []

    async def room() -> Room:
        return Room(config, MEMORY, [{"CPU": float(cores or 99), "memory": 1e12}], may_grow=False)

    def check(current: ClusterConfig, new: ClusterConfig) -> Mapping[Role, WorkerMemory]:
        return MEMORY

    async def on_over() -> None:
        assert supervisor.rollout is not None
        ended.append(supervisor.rollout.phase)

    values: dict[str, Any] = {"room": room, "expect": lambda memory: None, "memory": MEMORY, "check": check} | around
    return Rig(supervisor, launcher, Rollouts(supervisor, RolloutRoom(**values), on_over), ended)


def rolled(
    scenario: Callable[[Rig], Coroutine[Any, Any, None]],
    cores: int = 0,
    prefill: int = 1,
    decode: int = 2,
    start_s: float = 120.0,
    **around: Any,
) -> None:
    """Run a scenario on a cluster of one prefill worker and some decode workers, all ready. Without prefill it is colocated."""

    async def run() -> None:
        launcher, config = IdleLauncher(), settings(cores, prefill, decode, start_s)
        supervisor = Supervisor(config, launcher, ScriptedRecords())
        all_of_it = rig(supervisor, launcher, config, cores, **around)
        async with asyncio.timeout(30):
            await supervisor.start()
            await supervisor.settle(5)
            await scenario(all_of_it)
            await all_of_it.rollouts.close()
            await supervisor.close()
        assert not any(process.alive for process in launcher.processes.values())

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rollout.driver.LOOK_S", 0.005)
    monkeypatch.setattr("cluster.rollout.driver._NOTE_S", 0.0)


def counts(seconds: float, number: int = 30, failures: int = 0) -> RevisionCounts:
    return RevisionCounts(requests=number + failures, failures=failures, first_tokens=binned([seconds] * number))


def revisions(view: ClusterView) -> list[int]:
    return sorted(info.revision for info in view.workers)


@pytest.mark.parametrize("cores", [0, 5, 3])
def test_a_good_configuration_is_taken_by_all(cores: int) -> None:
    """With room for all of both, for the canary alone, and for no more than there are now: then the second decode worker goes
    first. Three cores leave no room for a second prefill worker, so that the rollout ends."""

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        if cores == 3:
            view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
            assert view.rollout is not None
            assert "there is no room for a new worker beside the others: prefill" in (view.rollout.reason or "")
            return
        view = await all_of_it.phase(RolloutPhase.CANARY)
        assert revisions(view) == [1, 1, 1, 2, 2]
        assert view.rollout is not None
        assert (view.revision, view.rollout.revision, view.rollout.share) == (1, 2, 0.2)
        assert view.rollout.changes == (f"decode.kv_cache_tokens: 65536 -> {KV_TOKENS}",)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        view = await all_of_it.phase(RolloutPhase.DONE)
        assert (view.revision, revisions(view)) == (2, [2, 2, 2])
        assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 2}
        assert {config.decode.kv_cache_tokens for config in [all_of_it.supervisor.pools.config]} == {KV_TOKENS}
        assert len(all_of_it.launcher.new_lives()) == 3
        all_of_it.launcher.new_lives()[0].die()
        await all_of_it.until(lambda view: any(info.restarts for info in view.workers))
        view = await all_of_it.until(lambda view: all(info.state is WorkerState.READY for info in view.workers))
        assert revisions(view) == [2, 2, 2], "the next life has the same configuration"
        assert all_of_it.ended == [RolloutPhase.DONE]

    rolled(scenario, cores)


def test_a_configuration_whose_workers_do_not_all_fit_into_memory_starts_none_of_them() -> None:
    """Each new worker fits in the place of a former one, and all of them together do not fit."""
    node = Node(5 * 10**9)

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert "no room for all workers with the new configuration: decode: 2 workers do not fit" in (view.rollout.reason or "")
        assert len(all_of_it.launcher.processes) == 4, "no new worker was started, and no former one ended"
        assert node.counted == MEMORY

    rolled(scenario, prefill=2, decode=2, **node.around())


def test_while_a_node_is_away_a_configuration_that_takes_no_more_is_rolled_out() -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        await all_of_it.phase(RolloutPhase.DONE)

    without_one = Node(4 * 10**9).around() | {"check": lambda current, new: MEMORY}
    rolled(scenario, prefill=2, decode=3, **without_one)


def test_where_there_is_no_room_a_former_worker_makes_some() -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.CANARY)
        assert revisions(view) == [1, 1, 2, 2]
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        view = await all_of_it.phase(RolloutPhase.DONE)
        assert revisions(view) == [2, 2, 2]

    rolled(scenario, cores=4)


@pytest.mark.parametrize(
    ("new", "reason"),
    [(counts(0.9), "time to the first token is longer"), (counts(0.2, failures=12), "12 of 42 requests failed")],
)
def test_a_worse_configuration_is_rolled_back(new: RevisionCounts, reason: str) -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.observe(current=counts(0.2, number=200), new=new)
        view = await all_of_it.until(lambda view: view.rollout is not None and view.rollout.reason is not None)
        assert view.rollout is not None
        assert view.rollout.share == 0.0
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert reason in (view.rollout.reason or "")
        assert (view.revision, revisions(view)) == (1, [1, 1, 1])
        while all_of_it.launcher.new_lives():  # noqa: ASYNC110 (they are forgotten, and end by themselves)
            await asyncio.sleep(0)
        assert all_of_it.rollouts.begin(ORDER) == 3, "no number is used twice"

    rolled(scenario)


def test_a_worker_that_cannot_start_rolls_back_with_its_error() -> None:
    async def scenario(all_of_it: Rig) -> None:
        async def refuse(ref: WorkerRef) -> None:
            if all_of_it.launcher.configs[ref.worker_id, ref.epoch].decode.kv_cache_tokens == KV_TOKENS:
                raise ConfigError("the model does not fit", param="model")

        all_of_it.launcher.on_start = refuse
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "new workers end: the model does not fit"
        assert revisions(view) == [1, 1, 1]

    rolled(scenario)


def test_a_model_that_routers_would_have_to_know_is_refused_before_anything_starts() -> None:
    def check(current: ClusterConfig, new: ClusterConfig) -> Mapping[Role, WorkerMemory]:
        raise ConfigError("model: its vocab_size differs", param="model")

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "model: its vocab_size differs"
        assert len(all_of_it.launcher.processes) == 3

    rolled(scenario, check=check)


def test_one_death_is_an_accident_and_two_are_none() -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.launcher.new_lives()[0].die()
        await all_of_it.until(lambda view: any(info.revision == 2 and info.restarts for info in view.workers))
        await all_of_it.until(lambda view: all(info.state is WorkerState.READY for info in view.workers))
        assert all_of_it.state.phase is RolloutPhase.CANARY
        all_of_it.launcher.new_lives()[-1].die()
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "new workers end: killed by signal 9"

    rolled(scenario)


def test_failures_while_workers_are_replaced_bring_the_former_ones_back() -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        await all_of_it.until(lambda view: revisions(view).count(1) == 4)
        all_of_it.observe(current=counts(0.2, number=200), new=counts(0.2, failures=12))
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert revisions(view) == [1] * 6
        assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 5}

    rolled(scenario, decode=5)


def test_an_operator_ends_it_at_any_moment() -> None:
    async def scenario(all_of_it: Rig) -> None:
        with pytest.raises(InvalidRequestError, match="no rollout is under way"):
            all_of_it.rollouts.abort()
        all_of_it.rollouts.begin(ORDER)
        with pytest.raises(InvalidRequestError, match="--abort"):
            all_of_it.rollouts.begin(ORDER)
        with pytest.raises(InvalidRequestError, match="--abort"):
            all_of_it.rollouts.check_none()
        assert all_of_it.rollouts.abort() == 2
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "an operator has ended it"
        all_of_it.rollouts.check_none()

    rolled(scenario)


def test_what_cannot_be_rolled_out_changes_nothing() -> None:
    async def scenario(all_of_it: Rig) -> None:
        before = all_of_it.supervisor.view()
        for changes, named in (
            ({"http": {"port": 9000}}, "http.port"),
            ({"decode": {"workers": 3}}, "decode.workers"),
            ({"decode": {"kv_cache_tokens": 65_536}}, "the one that the workers have"),
            ({"decode": {"kv_tokens": 1}}, "decode.kv_tokens: unknown key"),
        ):
            with pytest.raises(InvalidRequestError, match=named):
                all_of_it.rollouts.begin(RolloutOrder(changes, 0.1, 1.0, 20))
        assert all_of_it.supervisor.view() == before

    rolled(scenario)


def held_starts(all_of_it: Rig, which: Callable[[WorkerRef], bool]) -> asyncio.Event:
    """No life of these starts until the event is set."""
    free = asyncio.Event()

    async def hold(ref: WorkerRef) -> None:
        if which(ref):
            await free.wait()

    all_of_it.launcher.on_start = hold
    return free


def leaves_without_room(all_of_it: Rig, worker_id: str) -> None:
    """The node of a worker is gone, and no other one has room."""

    def full(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
        raise InvalidRequestError("the nodes are full")

    life = next(info for info in all_of_it.supervisor.view().workers if info.worker_id == worker_id)
    told = {WorkerLife(worker_id, life.epoch): Leaving(0.0, 1.0)}
    all_of_it.supervisor.heed(told, 2.0, full)


def ready_of(view: ClusterView, revision: int) -> set[Role]:
    ready = [info for info in view.workers if info.revision == revision and info.state is WorkerState.READY]
    return {info.role for info in ready}


def test_new_workers_serve_until_the_former_ones_are_back() -> None:
    looks = 0

    async def room() -> Room:
        nonlocal looks
        looks += 1
        return Room(settings(0), MEMORY, [{"CPU": 99.0, "memory": 1e12}], may_grow=False)

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        free = held_starts(all_of_it, lambda ref: True)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        await all_of_it.until(lambda view: Role.PREFILL not in ready_of(view, 1) and len(view.workers) == 4)
        all_of_it.rollouts.abort()
        await all_of_it.phase(RolloutPhase.ROLLING_BACK)
        view = await all_of_it.until(
            lambda view: any(info.revision == 1 and info.role is Role.PREFILL for info in view.workers)
        )
        later = looks + 5
        while looks < later:  # noqa: ASYNC110 (a look that changes nothing tells nobody)
            await asyncio.sleep(0.001)
        view = all_of_it.supervisor.view()
        assert view.rollout is not None
        assert view.rollout.share == 0.0
        assert Role.PREFILL not in ready_of(view, 1)
        assert ready_of(view, 2) == set(Role), "else no pair could serve"
        free.set()
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert revisions(view) == [1, 1, 1]

    rolled(scenario, room=room)


@pytest.mark.parametrize("role", list(Role))
def test_without_a_new_worker_and_room_for_one_it_is_rolled_back(role: Role) -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.CANARY)
        (new,) = (info.worker_id for info in view.workers if info.revision == 2 and info.role is role)
        leaves_without_room(all_of_it, new)
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == f"no new worker is left: {role.value} has had 0 ready for 1 s"

    rolled(scenario, start_s=1.0)


def test_when_no_former_worker_is_left_there_is_nothing_to_abort_and_nothing_to_wait_for_without_end() -> None:
    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.phase(RolloutPhase.CANARY)
        canary = {info.worker_id for info in view.workers if info.revision == 2}
        starts = 0

        def is_last(ref: WorkerRef) -> bool:
            nonlocal starts
            starts += 1
            return ref.worker_id not in canary

        held_starts(all_of_it, is_last)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        view = await all_of_it.until(lambda view: bool(starts))
        (last,) = (info.worker_id for info in view.workers if info.state is WorkerState.STARTING)
        leaves_without_room(all_of_it, last)
        all_of_it.supervisor.arrange(lambda pools: pools.size_revisions(dict.fromkeys(Role, 0), {}), all_of_it.state)
        with pytest.raises(InvalidRequestError, match="no former worker is left"):
            all_of_it.rollouts.abort()
        view = await all_of_it.phase(RolloutPhase.DONE)
        assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 2}
        assert revisions(view) == [2, 2]

    rolled(scenario, start_s=1.0)


def test_a_new_worker_that_is_lost_right_after_the_last_former_one_has_gone_does_not_hold_the_rollout_up() -> None:
    """Without room beside, the last former worker goes first. The new one dies for good before its successor is wanted."""

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        await all_of_it.until(lambda view: all_of_it.supervisor.pools.numbers()[0][Role.DECODE].wanted == 0)

        async def fails(ref: WorkerRef) -> None:
            raise UnavailableError("its GPU is gone")

        all_of_it.launcher.on_start = fails
        for process in all_of_it.launcher.new_lives():
            process.die()
        view = await all_of_it.phase(RolloutPhase.DONE)
        assert view.wanted[Role.DECODE] == 2
        all_of_it.rollouts.check_none()

    rolled(scenario, cores=2, prefill=0, start_s=0.3)


def test_an_operator_does_not_wait_for_a_model_that_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = threading.Event()

    def check(current: ClusterConfig, new: ClusterConfig) -> Mapping[Role, WorkerMemory]:
        fetched.wait(20)
        return MEMORY

    async def scenario(all_of_it: Rig) -> None:
        all_of_it.rollouts.begin(ORDER)
        await asyncio.sleep(0)
        all_of_it.rollouts.abort()
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "an operator has ended it"
        monkeypatch.setattr("cluster.rollout.room._CHECK_S", 0.01)
        all_of_it.rollouts.begin(ORDER)
        view = await all_of_it.until(lambda view: view.rollout is not None and view.rollout.revision == 3)
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK)
        assert view.rollout is not None
        assert view.rollout.reason == "its model was not read within 0.01 s"
        fetched.set()

    rolled(scenario, check=check)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_new_controller_rolls_back_what_is_half_done_and_ends_what_is_all_but_done(replaced: bool) -> None:
    """Of the record of each moment of a rollout, as a controller would find it that comes after a death."""

    async def scenario() -> None:
        new_memory = dict.fromkeys(Role, WorkerMemory(kv_pool=2 * 10**9, weights=0, process=0))
        for record in await half_done(replaced):
            expected: list[Mapping[Role, WorkerMemory]] = []
            second = taken_up(record, expect=expected.append, check=lambda current, new: new_memory)
            await comes_to_its_end(second, replaced)
            assert expected[-1] == (new_memory if replaced else MEMORY)

    bounded(scenario())


def test_a_new_controller_starts_former_workers_only_as_large_new_ones_go() -> None:
    """It has not read the new model, so it can't know that the workers take twice as much."""

    async def scenario() -> None:
        records = await half_done(replaced=False, **Node(8 * 10**9).around())
        replacing = [record for record in records if record.rollout and record.rollout.phase is RolloutPhase.REPLACING]
        second = taken_up(replacing[-1], BusyLauncher(), **Node(8 * 10**9).around())
        assert await second.supervisor.start()
        second.rollouts.resume()
        most = 0  # in GB
        while second.state.phase is not RolloutPhase.ROLLED_BACK:
            former, new = second.supervisor.pools.numbers()
            taken = sum(each.present for each in former.values()) + 2 * sum(each.present for each in new.values())
            most = max(most, taken)
            await asyncio.sleep(0.001)
        assert most <= 8
        assert revisions(second.supervisor.view()) == [1, 1, 1]
        await second.rollouts.close()
        await second.supervisor.close()

    bounded(scenario())


def test_a_new_controller_brings_a_role_back_while_there_are_more_of_the_other_than_wanted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the new workers have served for long enough, prompts are to be computed, however long decode is busy."""
    prefill_is_back = asyncio.Event()

    class BusyDecode(Idle):
        async def drain(self) -> None:
            if self.role is Role.DECODE:
                await prefill_is_back.wait()

    class Launcher(IdleLauncher):
        kind = BusyDecode

    def is_former_prefill(info: WorkerInfo) -> bool:
        return (info.role, info.revision, info.state) == (Role.PREFILL, 1, WorkerState.READY)

    async def scenario() -> None:
        records = await half_done(replaced=False, **Node(8 * 10**9).around())
        without_prefill = [record for record in records if not record.pools[Role.PREFILL].desired]
        second = taken_up(without_prefill[-1], Launcher(), **Node(8 * 10**9).around())
        monkeypatch.setattr(Rollouts, "_start_s", 0.1)
        assert await second.supervisor.start()
        former, new = second.supervisor.pools.numbers()
        assert former[Role.DECODE].present + new[Role.DECODE].present == 3
        second.rollouts.resume()
        await second.until(lambda view: any(is_former_prefill(info) for info in view.workers))
        prefill_is_back.set()
        await second.phase(RolloutPhase.ROLLED_BACK)
        await second.rollouts.close()
        await second.supervisor.close()

    bounded(scenario())
    assert "still works after" not in caplog.text


@pytest.mark.parametrize("replaced", [False, True])
def test_what_goes_wrong_after_the_death_of_a_controller_is_tried_again(
    replaced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.rollout.driver._AGAIN_S", 0.01)

    def check(current: ClusterConfig, new: ClusterConfig) -> Mapping[Role, WorkerMemory]:
        raise FileNotFoundError("tokenizer.json")

    async def scenario() -> None:
        record = (await half_done(replaced))[0]
        second = taken_up(record, check=check)
        arrange, failures = second.supervisor.arrange, [RuntimeError("a bug")]

        def fails_once(*args: Any) -> None:
            if failures:
                raise failures.pop()
            arrange(*args)

        monkeypatch.setattr(second.supervisor, "arrange", fails_once)
        await comes_to_its_end(second, replaced)
        assert not failures

    bounded(scenario())
    assert "the rollout did not come to its end: it is tried again" in caplog.text


@pytest.mark.parametrize("moment", [RolloutPhase.ROLLING_BACK, RolloutPhase.DONE])
def test_an_error_on_the_way_to_the_end_is_not_the_end(
    moment: RolloutPhase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.rollout.driver._AGAIN_S", 0.01)

    async def scenario(all_of_it: Rig) -> None:
        arrange, failed = all_of_it.supervisor.arrange, False

        def fails_once(change: Callable[[Pools], list[Action]], rollout: RolloutState) -> None:
            nonlocal failed
            if rollout.phase is moment and not failed:
                failed = True
                raise RuntimeError("a bug")
            arrange(change, rollout)

        monkeypatch.setattr(all_of_it.supervisor, "arrange", fails_once)
        all_of_it.rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        worse = moment is RolloutPhase.ROLLING_BACK
        all_of_it.observe(current=counts(0.2, number=200), new=counts(0.2, failures=12 if worse else 0))
        view = await all_of_it.phase(RolloutPhase.ROLLED_BACK if worse else RolloutPhase.DONE)
        assert failed
        assert set(revisions(view)) == ({1} if worse else {2})
        assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 2}

    rolled(scenario)


def test_what_fails_after_the_end_changes_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(all_of_it: Rig) -> None:
        async def fails() -> None:
            raise RuntimeError("a bug")

        rollouts = Rollouts(all_of_it.supervisor, all_of_it.rollouts._room, fails)
        all_of_it.rollouts = rollouts
        rollouts.begin(ORDER)
        await all_of_it.phase(RolloutPhase.CANARY)
        all_of_it.observe(current=counts(0.2), new=counts(0.2))
        await all_of_it.phase(RolloutPhase.DONE)
        assert rollouts._task is not None
        await rollouts._task
        assert all_of_it.state.phase is RolloutPhase.DONE

    rolled(scenario)
    assert "a bug" in caplog.text


def bounded(scenario: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(run())


async def half_done(replaced: bool, **around: Any) -> list[ClusterRecord]:
    """The records of a rollout under way, before or after its last former worker was given up."""
    config, records, launcher = settings(0), AllRecords(), IdleLauncher()
    supervisor = Supervisor(config, launcher, records)
    first = rig(supervisor, launcher, config, 0, **around)
    await supervisor.start()
    await supervisor.settle(5)
    first.rollouts.begin(ORDER)
    await first.phase(RolloutPhase.CANARY)
    first.observe(current=counts(0.2), new=counts(0.2))
    await first.phase(RolloutPhase.DONE)
    await first.rollouts.close()
    await supervisor.close()
    under_way = [
        record
        for record in records.all
        if record.rollout is not None
        and not record.rollout.phase.is_over
        and replaced == (not any(pool.desired for pool in record.pools.values()))
    ]
    assert under_way
    return under_way


def taken_up(record: ClusterRecord, launcher: IdleLauncher | None = None, **around: Any) -> Rig:
    """The cluster of a controller that finds this record."""
    launcher = launcher or IdleLauncher()
    launcher.left = {WorkerLife(*life) for life, _ in record.processes}
    return rig(Supervisor(settings(0), launcher, AllRecords(record)), launcher, settings(0), 0, **around)


async def comes_to_its_end(second: Rig, replaced: bool) -> None:
    assert await second.supervisor.start()
    second.rollouts.resume()
    view = await second.phase(RolloutPhase.DONE if replaced else RolloutPhase.ROLLED_BACK)
    assert set(revisions(view)) == ({2} if replaced else {1})
    assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 2}
    await second.rollouts.close()
    await second.supervisor.close()


class AllRecords(ScriptedRecords):
    """Remembers every record that was saved, each as JSON brings it back."""

    def __init__(self, record: ClusterRecord | None = None) -> None:
        super().__init__()
        self.record = record
        self.all: list[ClusterRecord] = []

    async def save(self, record: ClusterRecord) -> None:
        from pydantic import TypeAdapter

        adapter = TypeAdapter(ClusterRecord)
        await super().save(adapter.validate_json(adapter.dump_json(record)))
        assert self.record == record
        self.all.append(record)
