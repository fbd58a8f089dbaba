"""A Ray of our own: what is left out of it, by the names that the installed Ray has for that, and how it fails to start."""

from __future__ import annotations

import errno
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray._private import parameter, services

from cluster.ray import session
from cluster.ray.leftovers import RAY_SESSIONS
from cluster.ray.session import LEFT_OUT, lean_node
from protocol.errors import ConfigError, UnavailableError


def test_a_ray_that_does_not_start_is_one_sentence_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def too_slow(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "init", too_slow)
    monkeypatch.setattr(session, "TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ})
    with (
        pytest.raises(
            UnavailableError, match=r"^Ray did not start on this machine: The current node timed out during startup\.$"
        ),
        session.local_ray(),
    ):
        raise AssertionError("it does not come so far")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_sessions_are_where_leftovers_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    """Ray itself goes by these variables, and refuses a path that leaves no room for the names of its sockets."""
    monkeypatch.setenv(variable, str(tmp_path / ("long" * 20)))
    init = Mock()
    monkeypatch.setattr(ray, "init", init)
    session._start_ray()
    assert init.call_args.kwargs["_temp_dir"] == str(RAY_SESSIONS)


@pytest.mark.parametrize("name", ["mkdtemp", "claim"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(*((tempfile, "mkdtemp", full) if name == "mkdtemp" else (session, "claim", full)))
    monkeypatch.setattr(session, "TEMPORARY", tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path} can't be written: No space left on device$"), session.local_ray():
        raise AssertionError("it does not come so far")
    assert list(tmp_path.iterdir()) == []


def test_ray_knows_what_is_left_out() -> None:
    assert LEFT_OUT.keys() <= inspect.signature(parameter.RayParams).parameters.keys()


def test_a_node_has_no_monitors_no_dashboard_and_an_agent_at_any_port() -> None:
    with lean_node():
        made = parameter.RayParams(num_cpus=1, include_dashboard=False)
        made.update_if_absent(include_log_monitor=True, no_monitor=False, dashboard_agent_listen_port=52365)
        dashboard: Any = services.start_api_server
        assert dashboard(False, True, port=8265) == ("", None)
    assert {name: getattr(made, name) for name in LEFT_OUT} == LEFT_OUT


def test_other_nodes_are_as_they_were() -> None:
    whole, dashboard = parameter.RayParams, services.start_api_server
    with lean_node():
        pass
    assert (parameter.RayParams, services.start_api_server) == (whole, dashboard)
