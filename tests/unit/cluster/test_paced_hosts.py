"""Hosts of paced workers on nodes that will go: who lives there is known, and nothing begins there. Ray is scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.ray.actors import NamedActor
from cluster.ray.paced.launcher import PacedLauncher
from configs.schema import ClusterConfig, DecodeConfig, PrefillConfig
from protocol.messages.workers import Role, WorkerLife


def test_lives_on_a_node_that_goes_are_known_and_none_begins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def new_actor(process_class: type, name: str, bundle: Any) -> NamedActor:
        made.append(name)
        return NamedActor(name, f"node-{len(made)}")

    monkeypatch.setattr("cluster.ray.paced.launcher.new_actor", new_actor)
    monkeypatch.setattr("cluster.ray.paced.launcher.node_of_actor", lambda handle: handle)
    lives = [WorkerLife(f"worker-{number}", 1) for number in range(4)]

    async def scenario() -> None:
        config = ClusterConfig(engine="paced", prefill=PrefillConfig(workers=1), decode=DecodeConfig(workers=1))
        launcher = PacedLauncher(config, b"secret", {})
        first = launcher.host_for(Role.PREFILL, lives[0])
        assert launcher.host_for(Role.DECODE, lives[1]) is first
        await first.actor
        assert await launcher.leave_nodes(["node-1", "node-7"]) == {lives[0]: "node-1", lives[1]: "node-1"}
        second = launcher.host_for(Role.PREFILL, lives[2])
        assert second is not first
        await second.actor
        assert set(await launcher.leave_nodes(["node-1"])) == set(lives[:2])
        assert launcher.host_for(Role.DECODE, lives[3]) is second
        assert await launcher.leave_nodes([]) == {}
        assert not first.leaves, "it was another node's deadline, or nobody's any more"

    asyncio.run(scenario())
