"""The watch over nodes that will go, on a real supervisor whose processes and nodes are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import pytest

from cluster.nodes.gcs import DrainedNode
from cluster.nodes.watch import NodeWatch
from cluster.ray.placement import Room
from cluster.supervision.supervisor import Supervisor
from protocol.cluster_view import WorkerState
from protocol.errors import UnavailableError
from protocol.messages.workers import Role, WorkerLife
from tests.unit.cluster.supervision.scripted import ScriptedLauncher, ScriptedRecords, all_ready, config, one, seen
from tests.unit.cluster.test_sizer import room

LONGEST_S = 600.0


class ScriptedNodes:
    """Says which nodes are drained, and where workers are: on `home`, unless a test says otherwise."""

    def __init__(self, workers: int) -> None:
        self.drained: list[DrainedNode] = []
        self.homes: dict[WorkerLife, str] = {}
        self.left: Collection[str] = ()
        self.cleared: Collection[str] = ()
        self.away = False
        self._workers = self.grown = workers
        """Workers for which the nodes have room, and for which those have that may join."""

    def drained_nodes(self) -> list[DrainedNode]:
        if self.away:
            raise UnavailableError("the GCS does not answer: it is away")
        return self.drained

    async def leave_nodes(self, nodes: Collection[str]) -> Mapping[WorkerLife, str]:
        self.left = list(nodes)
        return {life: node for life, node in self.homes.items() if node in nodes}

    def clear(self, nodes: Collection[str]) -> None:
        self.cleared = set(nodes)

    async def room(self, *, grows: bool) -> Room:
        return room(config(), self.grown if grows else self._workers)


Scene = Callable[[Supervisor, ScriptedLauncher, ScriptedNodes, NodeWatch], Coroutine[Any, Any, None]]


def watched(scene: Scene, workers: int = 100) -> None:
    """Run a scene with one prefill and two decode workers that are ready, on nodes with room for so many."""

    async def run() -> None:
        launcher, nodes = ScriptedLauncher(), ScriptedNodes(workers)
        supervisor = Supervisor(config(decode=2), launcher, ScriptedRecords())
        watch = NodeWatch(nodes.drained_nodes, nodes, supervisor, LONGEST_S, nodes.clear)
        async with asyncio.timeout(10):
            await supervisor.start()
            await supervisor.settle(5)
            await scene(supervisor, launcher, nodes, watch)
            await watch.close()
            await supervisor.close()
        assert not any(process.alive for process in launcher.processes.values())

    asyncio.run(run())


def test_a_node_is_left_with_replacements_first() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.homes = {WorkerLife("worker-1", 1): "b", WorkerLife("worker-2", 1): "b"}
        begins = asyncio.Event()

        async def late(ref: Any) -> None:
            await begins.wait()

        launcher.on_start = late
        nodes.drained = [DrainedNode("b", "10.0.0.2", time.time() + 100)]
        await watch.look()
        view = supervisor.view()
        assert [ref.worker_id for ref in view.usable(Role.DECODE)] == ["worker-1", "worker-2"], "they serve on"
        assert {info.worker_id for info in view.workers if info.leaves_at} == {"worker-1", "worker-2"}
        assert nodes.left == ["b"]
        begins.set()
        await seen(supervisor, lambda view: len(view.usable(Role.DECODE)) == 4)
        await watch.look()
        assert one(supervisor.view(), "worker-1").state is WorkerState.DRAINING
        for worker_id in ("worker-1", "worker-2"):
            launcher.processes[worker_id, 1].idle.set()
        view = await seen(supervisor, lambda view: len(view.workers) == 3 and all_ready(view))
        assert {info.worker_id for info in view.workers} == {"worker-0", "worker-3", "worker-4"}
        while len(launcher.released) < 2:
            launcher.release_seen.clear()
            await launcher.release_seen.wait()
        assert sorted(launcher.released) == ["worker-1", "worker-2"]

    watched(scene)


def test_what_has_not_left_in_time_is_ended_before_the_node_is() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", time.time() - 1)]
        await watch.look()
        view = await seen(supervisor, lambda view: launcher.processes["worker-2", 1].killed and all_ready(view))
        assert {info.worker_id for info in view.workers if info.role is Role.DECODE} == {"worker-1", "worker-3"}

    watched(scene)


def test_without_room_it_says_so_and_begins_one_when_there_is_some() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", time.time() + 100)]
        await watch.look()
        leaving = one(supervisor.view(), "worker-2")
        assert leaving.state is WorkerState.DRAINING
        assert "no other has room: decode: 2 workers do not fit" in str(leaving.last_error)
        launcher.processes["worker-2", 1].idle.set()
        await seen(supervisor, lambda view: len(view.workers) == 2)
        nodes.drained, nodes._workers, nodes.grown = [], 3, 3
        await watch.look()
        await seen(supervisor, lambda view: len(view.workers) == 3 and all_ready(view))

    watched(scene, workers=2)


def test_a_worker_that_has_left_has_a_node_added_and_one_that_leaves_does_not_wait_for_it() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.grown = 3
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", time.time() + 100)]
        await watch.look()
        assert len(supervisor.view().workers) == 3, "nobody begins who waits for a node that may never come"
        launcher.processes["worker-2", 1].idle.set()
        await seen(supervisor, lambda view: len(view.workers) == 2)
        nodes.homes, nodes.drained = {}, []
        await watch.look()
        view = await seen(supervisor, all_ready)
        assert one(view, "worker-2").epoch == 2
        assert not supervisor.any_leaving

    watched(scene, workers=2)


def test_a_node_without_a_deadline_has_as_long_as_a_drain() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", None)]
        before = time.time()
        await watch.look()
        first = one(supervisor.view(), "worker-2").leaves_at
        assert first is not None
        assert before + LONGEST_S <= first <= time.time() + LONGEST_S
        await watch.look()
        assert one(supervisor.view(), "worker-2").leaves_at == first, "no longer from look to look"
        nodes.drained = [DrainedNode("b", "10.0.0.2", first - 500)]
        await watch.look()
        assert one(supervisor.view(), "worker-2").leaves_at == first - 500

    watched(scene)


def test_other_nodes_and_quiet_times_change_nothing() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        version = supervisor.view().version
        await watch.look()
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("c", "10.0.0.3", time.time() + 100)]
        await watch.look()
        assert supervisor.view().version == version

    watched(scene)


def test_a_gcs_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("cluster.nodes.watch.LOOK_S", 0.01)

    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def drained_nodes() -> list[DrainedNode]:
            loop.call_soon_threadsafe(asked.set)
            return nodes.drained_nodes()

        watch._drained_nodes = drained_nodes
        nodes.away = True
        nodes.homes = {WorkerLife("worker-2", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", time.time() + 100)]
        watch.start()
        for _ in range(3):
            asked.clear()
            await asked.wait()
        nodes.away = False
        await seen(supervisor, lambda view: any(info.leaves_at for info in view.workers))
        assert [record.message for record in caplog.records].count(
            "nobody knows which nodes will go: the GCS does not answer: it is away"
        ) == 1

    watched(scene)


def test_what_else_is_on_a_node_goes_when_no_worker_is_there() -> None:
    async def scene(supervisor: Supervisor, launcher: ScriptedLauncher, nodes: ScriptedNodes, watch: NodeWatch) -> None:
        nodes.homes = {WorkerLife("worker-1", 1): "b"}
        nodes.drained = [DrainedNode("b", "10.0.0.2", None), DrainedNode("c", "10.0.0.3", None)]
        await watch.look()
        assert nodes.cleared == {"c"}
        nodes.homes = {}
        await watch.look()
        assert nodes.cleared == {"b", "c"}

    watched(scene)
