"""Folders of tiers: shared by those who agree, kept or removed by the last one, and cleared when all have been killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.tiers import occupied
from kv_transfer.tiers.occupied import Occupied, memory_folder, remove_left
from protocol.errors import ConfigError

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(occupied, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("keep", [False, True])
def test_the_last_one_to_leave_decides(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "kv"
    first, second = Occupied(folder, b"x", keep=keep), Occupied(folder, b"x", keep=keep)
    (folder / "block").write_text("kv")
    first.leave()
    first.leave()
    assert (folder / "block").exists()
    second.leave()
    assert (folder / "block").exists() == keep


def test_another_description_is_refused_while_somebody_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first = Occupied(folder, b"one model", keep=True)
    for other in (b"another", b"one mode", b"one model 2"):
        with pytest.raises(ConfigError, match="another model"):
            Occupied(folder, other, keep=True)
    first.leave()
    Occupied(folder, b"another", keep=True).leave()


def test_what_killed_workers_leave_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, lives = memory_folder(SECRET), memory_folder(b"t" * 32)
    code = f"""
import os, signal
from pathlib import Path
from kv_transfer.tiers.occupied import Occupied
Occupied(Path({str(left)!r}), b"x", keep=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode < 0
    there = Occupied(lives, b"x", keep=False)
    foreign = tmp_path / "tandem-kv-other"
    foreign.mkdir()
    assert left.is_dir()
    assert remove_left() == [left]
    assert sorted(tmp_path.iterdir()) == sorted([lives, foreign])
    there.leave()
    assert list(tmp_path.iterdir()) == [foreign]
