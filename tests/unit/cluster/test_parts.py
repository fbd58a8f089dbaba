"""What a cluster waits for before its parts are started."""

from __future__ import annotations

import pytest

from cluster.ray import parts
from cluster.ray.parts import Parts
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, UnavailableError

CONFIG = {"http": {"router_replicas": 2, "router_resources": {"tandem_entry": 1}, "host": "::1"}}


def looks(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[int]:
    """Each look finds so many nodes with an entry, and the last number for ever. Returns the looks."""
    made: list[int] = []

    def node_resources() -> list[dict[str, float]]:
        made.append(numbers[min(len(made), len(numbers) - 1)])
        return [{"CPU": 1.0, "tandem_entry": 1.0}] * made[-1]

    monkeypatch.setattr(parts, "node_resources", node_resources)
    monkeypatch.setattr(parts, "_LOOK_S", 0.0)
    return made


def started(**limits: float) -> None:
    """Start a cluster, up to the first thing that comes after the nodes: there is no memory for any worker."""
    Parts.start(ClusterConfig.model_validate(CONFIG | {"limits": limits}), b"", {}, {}, may_grow=True)


def test_nodes_that_join_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = looks(monkeypatch, 0, 1, 1, 2)

    def no_room(*_: object) -> None:
        raise ConfigError("this is what comes next")

    monkeypatch.setattr(parts, "_check_room", no_room)
    with pytest.raises(ConfigError, match="what comes next"):
        started(worker_start_s=60.0)
    assert made == [0, 1, 1, 2]


def test_nodes_that_do_not_come_are_no_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    looks(monkeypatch, 1)
    with pytest.raises(UnavailableError, match=r"2 routers need .* enough for 1, after 0.05 s"):
        started(worker_start_s=0.05)
