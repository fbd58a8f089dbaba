"""What a cluster waits for before its parts are started: nodes that join, as when the head is there first after a power cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.memory import WorkerMemory
from cluster.ray import parts
from cluster.ray.parts import Parts
from configs.loader import load_config
from protocol.errors import ConfigError, UnavailableError
from protocol.messages.workers import Role

Node = dict[str, float]
GB = 10**9
MEMORY = dict.fromkeys(Role, WorkerMemory(kv_pool=8 * GB, weights=0, process=0))
ENTRY, LARGE, SMALL = {"tandem_entry": 1.0, "memory": 1000.0 * GB}, {"memory": 25.0 * GB}, {"memory": 1.0 * GB}
ENTRIES = {"http.router_replicas": 2, "http.router_resources": {"tandem_entry": 1}, "http.host": "::1"}


def looks(monkeypatch: pytest.MonkeyPatch, *found: Sequence[Node]) -> list[Sequence[Node]]:
    """Each look finds these nodes, and the last ones for ever. Returns the looks."""
    made: list[Sequence[Node]] = []

    def node_resources() -> list[Node]:
        made.append(found[min(len(made), len(found) - 1)])
        return [{"CPU": 8.0, **node} for node in made[-1]]

    monkeypatch.setattr(parts, "node_resources", node_resources)
    monkeypatch.setattr(parts, "start_controller", lambda *_, **more: "the controller")
    monkeypatch.setattr(parts, "_LOOK_S", 0.0)
    return made


def started(*, may_grow: bool = True, **overrides: Any) -> Any:
    """Start a cluster. Returns its controller."""
    return Parts.start(load_config(None, overrides), b"", MEMORY, {}, may_grow=may_grow).controller


@pytest.mark.parametrize(
    ("found", "overrides"),
    [
        ([[], [ENTRY], [ENTRY], [ENTRY, ENTRY]], ENTRIES),
        ([[SMALL], [SMALL], [SMALL, LARGE]], {}),
    ],
)
def test_nodes_that_join_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, found: list[list[Node]], overrides: dict[str, Any]
) -> None:
    made = looks(monkeypatch, *found)
    assert started(**overrides) == "the controller"
    assert made == found


@pytest.mark.parametrize(
    ("nodes", "overrides", "problem"),
    [
        ([ENTRY], ENTRIES, r"2 routers need .* enough for 1, after 0.05 s"),
        ([SMALL], {}, r"do not fit: .*the memory for workers is 1.0 GB; want fewer workers, .*, after 0.05 s"),
    ],
)
def test_nodes_that_do_not_come_are_no_fault_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, nodes: list[Node], overrides: dict[str, Any], problem: str
) -> None:
    looks(monkeypatch, nodes)
    with pytest.raises(UnavailableError, match=problem):
        started(**(overrides | {"limits.worker_start_s": 0.05}))


def test_a_machine_that_no_other_joins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = looks(monkeypatch, [SMALL])
    with pytest.raises(ConfigError, match="do not fit") as refused:
        started(may_grow=False)
    assert refused.value.param in ("prefill.workers", "decode.workers")
    assert len(made) == 1
