"""How actors are made. With real Ray: tests/integration."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from cluster import teardown
from cluster.controller import CONTROLLER, find_controller
from cluster.ray import actors
from cluster.ray.actors import find_actors, new_actor, take_up_actors
from protocol.errors import UnavailableError


def test_all_lives_of_a_kind_are_made_of_one_actor_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray exports each actor class, and forgets none while the controller lives."""
    exported: list[type] = []

    class Kind:
        pass

    class ActorClass:
        def options(self, **_: Any) -> ActorClass:
            return self

        def remote(self) -> str:
            return "handle"

    def remote(kind: type) -> ActorClass:
        exported.append(kind)
        return ActorClass()

    monkeypatch.setattr(ray, "remote", remote)
    made = [new_actor(Kind, name, {"CPU": 1.0}) for name in ("one", "two")]
    assert [(each.name, each.handle) for each in made] == [("one", "handle"), ("two", "handle")]
    assert exported == [Kind]


@pytest.mark.parametrize("listed", [True, False, RayError("the GCS does not answer")])
def test_a_controller_is_not_there_where_ray_lists_none(monkeypatch: pytest.MonkeyPatch, listed: bool | RayError) -> None:
    """`ray.get_actor` raises the same error where it gets no answer."""

    def get_actor(name: str, namespace: str) -> None:
        raise ValueError(f"Failed to look up actor {name!r}")

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        if isinstance(listed, RayError):
            raise listed
        return [{"name": CONTROLLER, "namespace": "tandem" if listed else "another"}]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray.util, "list_named_actors", list_named_actors)
    if not listed:
        assert find_controller() is None
        assert find_actors([CONTROLLER]) == []
        return
    monkeypatch.setattr("cluster.ray.actors._GCS_S", 0.0)
    for find in (find_controller, lambda: find_actors([CONTROLLER])):
        with pytest.raises(UnavailableError, match="does not say whether tandem-controller is there"):
            find()


def test_an_actor_is_found_when_the_gcs_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | Exception] = [ValueError("Failed to look up actor"), ValueError("Failed to look up actor"), "handle"]

    def get_actor(name: str, namespace: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        raise RayError("the GCS does not answer")

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray.util, "list_named_actors", list_named_actors)
    monkeypatch.setattr("cluster.ray.actors._ASK_AGAIN_S", 0.001)
    assert find_controller() == "handle"


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the groups that are removed, of a Ray cluster with one of `worker-0`, made in a namespace that is not ours."""
    gone: list[str] = []
    entries = {
        "0a" * 18: ("tandem-worker-0", "CREATED"),
        "0b" * 18: ("tandem-worker-1", "REMOVED"),
        "0c" * 18: ("other", "CREATED"),
    }

    def table() -> dict[str, dict[str, str]]:
        return {id_hex: {"name": name, "state": state} for id_hex, (name, state) in entries.items()}

    monkeypatch.setattr(actors, "placement_group_table", table)
    for module in (actors, teardown):
        monkeypatch.setattr(module, "remove_placement_group", lambda group: gone.append(group.id.hex()))
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: [])
    monkeypatch.setattr(teardown, "delete_records", lambda: None)
    return gone


def test_what_is_left_is_found_in_every_namespace(removed: list[str]) -> None:
    """Ray's `get_placement_group` would not find it: its namespace is that of the job which made it."""
    assert teardown.sweep()
    assert removed == ["0a" * 18]


class ScriptedController:
    """The handle of a controller, which notes in `ended` that it is closed."""

    def __init__(self, actor_id: str, ended: list[str]) -> None:
        self._actor_id = actor_id
        self._ended = ended
        self.close = self

    def remote(self) -> str:
        self._ended.append(self._actor_id)
        return "closing"


def test_the_end_of_a_cluster_leaves_the_next_one_alone(removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tandem serve` that was suspended wakes when its cluster was stopped, and another one was started."""
    ended: list[str] = []

    monkeypatch.setattr(teardown, "find_controller", lambda: ScriptedController("next", ended))
    monkeypatch.setattr(teardown, "at_head", lambda *_: None)
    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    assert not teardown.remove_cluster(application=False, memory_tiers=False, own=ScriptedController("own", ended))
    assert (ended, removed) == ([], [])
    assert teardown.remove_cluster(application=False, memory_tiers=False, own=ScriptedController("next", ended))
    assert (ended, removed) == (["next"], ["0a" * 18])


@pytest.mark.parametrize("while_it_ends", ["_remove_application", "at_head"])
def test_the_end_of_a_cluster_leaves_alone_one_that_begins_meanwhile(
    removed: list[str], monkeypatch: pytest.MonkeyPatch, while_it_ends: str
) -> None:
    """Another command has ended the cluster, and the next one begins while this one removes what is left."""
    ended: list[str] = []
    controllers: list[ScriptedController] = []
    calls: list[str] = []

    def called(name: str) -> bool:
        calls.append(name)
        if name == while_it_ends:
            controllers.append(ScriptedController("next", ended))
        return False

    monkeypatch.setattr(teardown, "find_controller", lambda: controllers[0] if controllers else None)
    monkeypatch.setattr(teardown, "_remove_application", lambda: called("_remove_application"))
    monkeypatch.setattr(teardown, "at_head", lambda *_: called("at_head"))
    assert not teardown.remove_cluster(memory_tiers=False, own=ScriptedController("own", ended))
    assert (ended, removed) == ([], [])
    assert calls[-1] == while_it_ends


def test_a_controller_takes_up_groups_of_every_namespace(removed: list[str]) -> None:
    assert {worker_id: group.id.hex() for worker_id, group in take_up_actors((), ["worker-0"]).items()} == {
        "worker-0": "0a" * 18
    }
    assert not removed
    assert not take_up_actors((), ["worker-2"])
    assert removed == ["0a" * 18]
