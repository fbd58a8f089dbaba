"""A Ray of our own that does not start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.ray import session
from protocol.errors import UnavailableError


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
