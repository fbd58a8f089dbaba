"""How long `tandem stop` leaves requests to end. The controller is a script: no Ray runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster import teardown
from cluster.open_requests import RETIRE_ANSWER_S
from configs.loader import load_config


class ScriptedController:
    """Its handle. What a call refers to is its answer, which takes as long as the call says."""

    def __init__(self) -> None:
        self.retired: list[float] = []
        started, rolled_out = load_config(None, {"limits.shutdown_s": 300.0}), load_config(None, {})
        self.configurations = SimpleNamespace(remote=lambda: ((started, rolled_out), 0.0))
        self.retire = SimpleNamespace(remote=self._retire)

    def _retire(self, deadline_s: float) -> tuple[int, float]:
        self.retired.append(deadline_s)
        return 0, deadline_s


@pytest.mark.parametrize(("asked", "given"), [(None, 300.0), (0.0, 0.0), (60.0, 60.0)])
def test_requests_have_the_time_of_the_configuration_or_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, asked: float | None, given: float
) -> None:
    controller = ScriptedController()

    def get(reference: tuple[Any, float], timeout: float) -> Any:
        answer, takes_s = reference
        assert timeout >= takes_s + RETIRE_ANSWER_S
        return answer

    monkeypatch.setattr(teardown, "find_controller", lambda: controller)
    monkeypatch.setattr(ray, "get", get)
    teardown.retire_cluster(asked)
    assert controller.retired == [given]
