"""`tandem rollout --config` and `--abort` look on until the end, through routers of which some hear of it late."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.commands.lib.http_client import ApiClient
from cluster.commands.workers.new_config import abort, try_config
from protocol.errors import ConfigError, UnavailableError


def rollout(phase: str, revision: int = 2) -> dict[str, Any]:
    return {
        "revision": revision,
        "phase": phase,
        "share": 0.1,
        "changes": ["quantization: auto -> int8"],
        "verdict": "as good as the others",
        "reason": "an operator has ended it" if phase == "rolled_back" else None,
        "figures": {},
    }


class Statuses:
    """Has the two methods of ApiClient that are used, and answers with one status after the other, the last one no more."""

    def __init__(self, *states: dict[str, Any] | None) -> None:
        self._states = list(states)
        self.posted: list[Any] = []

    def get(self, path: str) -> Any:
        assert path == "/admin/status"
        return {"rollout": self._states.pop(0)}

    def post(self, path: str, body: Any) -> Any:
        self.posted.append(body["action"])
        return {"revision": 2}


def client(*states: dict[str, Any] | None) -> ApiClient:
    return cast(ApiClient, Statuses(*states))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.commands.lib.waiting._ASK_AGAIN_S", 0.0)


@pytest.fixture
def changes(tmp_path: Path) -> Path:
    path = tmp_path / "changes.yaml"
    path.write_text("quantization: int8\n")
    return path


def test_it_looks_on_until_the_end_and_takes_what_it_saw(changes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = (None, rollout("done", revision=1), rollout("canary"), None, rollout("done"))
    try_config(client(*late), changes, 0.1, 1.0, 20)
    assert "done" in capsys.readouterr().err


def test_what_a_cluster_says_is_no_markup(changes: Path) -> None:
    try_config(client(rollout("canary") | {"verdict": "worse [/b]"}, rollout("done")), changes, 0.1, 1.0, 20)


def test_a_rollback_says_why(changes: Path) -> None:
    with pytest.raises(UnavailableError, match="rolled back: an operator has ended it"):
        try_config(client(rollout("rolled_back")), changes, 0.1, 1.0, 20)


def test_another_rollout_is_not_taken_for_this_one(changes: Path) -> None:
    with pytest.raises(UnavailableError, match="revision 2 is over, and another one is rolled out"):
        try_config(client(rollout("canary"), rollout("canary", revision=3)), changes, 0.1, 1.0, 20)


@pytest.mark.parametrize("forgotten", [None, rollout("done", revision=1)])
def test_a_cluster_that_was_restarted_knows_of_no_rollout(
    changes: Path, monkeypatch: pytest.MonkeyPatch, forgotten: dict[str, Any] | None
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("cluster.commands.workers.new_config.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    late = (*[None] * 50, rollout("canary"), *[None] * 50, rollout("canary"), *[forgotten] * 100)
    with pytest.raises(UnavailableError, match="the cluster knows nothing of revision 2: it was restarted"):
        try_config(client(*late), changes, 0.1, 1.0, 20)
    with pytest.raises(UnavailableError, match="the cluster knows nothing of revision 2: it was restarted"):
        abort(client(*late))


def test_an_abort_says_what_the_workers_have(capsys: pytest.CaptureFixture[str]) -> None:
    abort(client(None, rollout("rolling_back"), rollout("rolled_back")))
    assert "their former configuration" in capsys.readouterr().err
    with pytest.raises(UnavailableError, match="too late: the workers have the new configuration"):
        abort(client(rollout("replacing"), rollout("done")))
    assert "former" not in capsys.readouterr().err


@pytest.mark.parametrize("value", [".nan", "2026-01-01", "!!set {a, b}"])
def test_a_file_that_json_can_not_hold_is_named(changes: Path, value: str) -> None:
    changes.write_text(f"hf_overrides: {value}")
    with pytest.raises(ConfigError, match=r"changes.yaml: .*can't be written as JSON"):
        try_config(client(), changes, 0.1, 1.0, 20)
