"""Processes of a worker that can't be made whole, or hang before it has them. With real Ray: tests/integration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from cluster.memory import WorkerMemory
from cluster.ray import launcher as launchers
from cluster.ray.actors import NamedActor
from cluster.ray.launcher import RayLauncher
from cluster.ray.paced import launcher as paced_launchers
from cluster.ray.paced.launcher import PacedLauncher
from configs.schema import ClusterConfig
from protocol.errors import UnavailableError
from protocol.messages.workers import Role


@pytest.mark.parametrize("failing_rank", [1, 2])
def test_what_was_made_of_a_worker_that_can_not_be_made_is_killed(failing_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare process that is its first rank, and the ranks before the one that fails."""
    warm_up = SimpleNamespace(remote=lambda: asyncio.sleep(0))
    made: list[Any] = [SimpleNamespace(name="spare", handle=SimpleNamespace(warm_up=warm_up))]
    killed: list[Any] = []

    def new_actor(_: type, name: str, *__: Any, **___: Any) -> Any:
        if len(made) == failing_rank:
            raise OSError("the GCS is away")
        made.append(SimpleNamespace(name=name, handle=name))
        return made[-1]

    monkeypatch.setattr(launchers, "placement_group", lambda *_, **__: SimpleNamespace(bundle_specs=[]))
    monkeypatch.setattr(launchers, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "new_actor", new_actor)
    monkeypatch.setattr(launchers, "node_resources", lambda: [{}])
    monkeypatch.setattr(ray, "kill", killed.append)
    config = ClusterConfig.model_validate({"decode": {"tensor_parallel_size": 3}})

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        launcher = RayLauncher(config, b"secret", {Role.PREFILL: one, Role.DECODE: one}, may_grow=False)
        launcher._spare = asyncio.create_task(asyncio.sleep(0, made[0]))
        with pytest.raises(OSError, match="the GCS is away"):
            await launcher.create(Role.DECODE, "worker-1", 1)
        assert len(killed) == len(made)
        assert all(each.handle in killed for each in made)

    asyncio.run(main())
    assert len(made) == failing_rank


def test_a_spare_process_that_hangs_is_killed_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    made: list[str] = []

    def new_actor(_: type, name: str, *__: Any, **___: Any) -> Any:
        made.append(name)
        warm_up = SimpleNamespace(remote=lambda: asyncio.get_running_loop().create_future())
        return SimpleNamespace(name=name, handle=SimpleNamespace(name=name, warm_up=warm_up))

    monkeypatch.setattr(launchers, "placement_group", lambda *_, **__: SimpleNamespace(bundle_specs=[]))
    monkeypatch.setattr(launchers, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "new_actor", new_actor)
    monkeypatch.setattr(launchers, "node_resources", lambda: [{}])
    monkeypatch.setattr(ray, "kill", lambda handle: killed.append(handle.name))
    config = ClusterConfig.model_validate({"limits": {"worker_start_s": 0.1}})

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        launcher = RayLauncher(config, b"secret", {Role.PREFILL: one, Role.DECODE: one}, may_grow=False)
        launcher._begin_spare()
        [actor] = await asyncio.wait_for(launcher.create(Role.DECODE, "worker-1", 1), 5)
        assert killed == [made[0]]
        assert actor.name == made[1]

    asyncio.run(main())


def test_a_group_that_is_gone_is_not_used_again_where_another_one_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    def placement_group(bundles: Any, **_: Any) -> Any:
        groups.append(SimpleNamespace(bundle_specs=bundles, id=b"group"))
        if len(groups) == 2:
            raise OSError("the GCS is away")
        return groups[-1]

    used: list[Any] = []
    monkeypatch.setattr(launchers, "placement_group", placement_group)
    monkeypatch.setattr(launchers, "PlacementGroupSchedulingStrategy", lambda group, **_: used.append(group))
    monkeypatch.setattr(launchers, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(launchers, "nodes_of_groups", lambda: {b"group".hex(): "node-1"})
    monkeypatch.setattr(launchers, "new_actor", lambda _, name, *__, **___: SimpleNamespace(name=name, handle=name))

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        launcher = RayLauncher(ClusterConfig(), b"secret", {Role.PREFILL: one, Role.DECODE: one}, may_grow=True)
        await launcher.create(Role.DECODE, "worker-1", 1)
        await launcher.leave_nodes(["node-1"])
        with pytest.raises(OSError, match="the GCS is away"):
            await launcher.create(Role.DECODE, "worker-1", 2)
        await launcher.leave_nodes([])
        await launcher.create(Role.DECODE, "worker-1", 3)

    asyncio.run(main())
    assert used == [groups[0], groups[2]]


def test_a_spare_process_that_has_died_becomes_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    dead: list[str] = []

    async def warmed_up(name: str) -> None:
        if name in dead:
            raise RayActorError

    def new_actor(_: type, name: str, *__: Any, **___: Any) -> Any:
        made.append(name)
        warm_up = SimpleNamespace(remote=lambda: warmed_up(name))
        return SimpleNamespace(name=name, handle=SimpleNamespace(warm_up=warm_up))

    monkeypatch.setattr(launchers, "placement_group", lambda *_, **__: SimpleNamespace(bundle_specs=[]))
    monkeypatch.setattr(launchers, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "new_actor", new_actor)
    monkeypatch.setattr(launchers, "node_resources", lambda: [{}])
    monkeypatch.setattr(ray, "kill", lambda handle: None)

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        launcher = RayLauncher(ClusterConfig(), b"secret", {Role.PREFILL: one, Role.DECODE: one}, may_grow=False)
        launcher._begin_spare()
        assert launcher._spare is not None
        await launcher._spare
        dead.extend(made)
        [actor] = await launcher.create(Role.DECODE, "worker-1", 1)
        assert actor.name == "tandem-process-worker-1-1"

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RayLauncher, PacedLauncher])
def test_what_could_not_be_taken_up_from_a_silent_gcs_is_killed_when_it_answers(
    kind: type[RayLauncher | PacedLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    silences = 2
    killed: list[str] = []

    def find_actors(names: Sequence[str]) -> list[NamedActor]:
        nonlocal silences
        silences -= 1
        if silences >= 0:
            raise UnavailableError("Ray does not say whether it is there")
        return [NamedActor(name, name) for name in names]

    monkeypatch.setattr(launchers, "find_actors", find_actors)
    monkeypatch.setattr(paced_launchers, "find_actors", find_actors)
    monkeypatch.setattr(ray, "kill", killed.append)

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        memory = {Role.PREFILL: one, Role.DECODE: one}
        config = ClusterConfig()
        launcher = (
            PacedLauncher(config, b"secret", memory)
            if kind is PacedLauncher
            else RayLauncher(config, b"secret", memory, may_grow=False)
        )
        process = launcher.process(Role.DECODE, "worker-1", 1, config)
        for ask in (process.resume(["the process"]), process.kill()):
            with pytest.raises(UnavailableError):
                await ask
        await process.kill()

    asyncio.run(main())
    assert killed == ["the process"]


@pytest.mark.parametrize("joins", ["before the spare is made", "before it is taken", "never"])
def test_no_spare_process_becomes_a_worker_once_a_second_node_has_joined(monkeypatch: pytest.MonkeyPatch, joins: str) -> None:
    killed: list[str] = []
    made: list[str] = []
    nodes: list[dict[str, float]] = [{}]

    def new_actor(_: type, name: str, *__: Any, **___: Any) -> Any:
        made.append(name)
        warm_up = SimpleNamespace(remote=lambda: asyncio.sleep(0))
        return SimpleNamespace(name=name, handle=SimpleNamespace(name=name, warm_up=warm_up))

    monkeypatch.setattr(launchers, "placement_group", lambda *_, **__: SimpleNamespace(bundle_specs=[]))
    monkeypatch.setattr(launchers, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(launchers, "new_actor", new_actor)
    monkeypatch.setattr(launchers, "node_resources", lambda: nodes)
    monkeypatch.setattr(ray, "kill", lambda handle: killed.append(handle.name))

    async def main() -> None:
        one = WorkerMemory(0, 0, 0)
        launcher = RayLauncher(ClusterConfig(), b"secret", {Role.PREFILL: one, Role.DECODE: one}, may_grow=True)
        if joins == "before the spare is made":
            nodes.append({})
        launcher._begin_spare()
        assert launcher._spare is not None
        await launcher._spare
        if joins == "before it is taken":
            nodes.append({})
        [actor] = await launcher.create(Role.DECODE, "worker-1", 1)
        assert actor.name.startswith("tandem-process-spare-" if joins == "never" else "tandem-process-worker-1-1")
        assert killed == [name for name in made if name != actor.name]

    asyncio.run(main())
