"""A Ray of our own that does not start."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from cluster.ray import session
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


@pytest.mark.parametrize("name", ["mkdtemp", "claim"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(*((tempfile, "mkdtemp", full) if name == "mkdtemp" else (session, "claim", full)))
    monkeypatch.setattr(session, "TEMPORARY", tmp_path)
    with pytest.raises(ConfigError, match=f"^{tmp_path} can't be written: No space left on device$"), session.local_ray():
        raise AssertionError("it does not come so far")
    assert list(tmp_path.iterdir()) == []
