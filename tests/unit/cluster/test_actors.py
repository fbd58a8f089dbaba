"""How actors are made. With real Ray: tests/integration."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster.ray.actors import new_actor


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
