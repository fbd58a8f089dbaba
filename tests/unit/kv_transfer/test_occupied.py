"""Folders of tiers: shared by those who agree, kept or removed by the last one, and cleared when all have been killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("call", ["access", "stat", "open"])
def test_a_folder_that_the_last_one_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = tmp_path / "kv"
    others = [Occupied(folder, b"x", keep=False)]
    real = getattr(os, call)

    def after_the_others_left(path: Any, *args: Any, **kwargs: Any) -> Any:
        if others and Path(path) in (folder, folder / "in_use"):
            others.pop().leave()
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, after_the_others_left)
        occupied_folder = Occupied(folder, b"x", keep=False)
    assert not others
    assert folder.is_dir()
    occupied_folder.leave()


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


class KilledError(BaseException):
    """The process ends here."""


def killed_after(calls: int, patch: pytest.MonkeyPatch) -> None:
    """Have the process end when it has removed so many files and folders, where `in_use` is listed first."""
    left, scandir = calls, os.scandir

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def remove(*args: Any, **kwargs: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            call(*args, **kwargs)

        return remove

    patch.setattr(os, "scandir", lambda path: nullcontext(sorted(scandir(path), key=lambda entry: entry.name != "in_use")))
    for name in ("unlink", "rmdir"):
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("calls", range(0, 24, 3))
def test_a_removal_that_is_cut_off_anywhere_is_completed_by_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    folder = memory_folder(SECRET)
    occupied_folder = Occupied(folder, b"x", keep=False)
    for name in "0123456789ab":
        (folder / name).mkdir()
        (folder / name / "block").write_text("kv")
        (folder / f"index-{name}.db").write_text("rows")
    fd = occupied_folder._fd
    with monkeypatch.context() as patch:
        killed_after(calls, patch)
        with pytest.raises(KilledError):
            occupied_folder.leave()
    os.close(fd)  # as the kernel does
    assert any(folder.rglob("block"))
    assert remove_left() == [folder]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["truncate", "pwrite", "open"])
def test_a_full_disk_is_a_refusal_and_leaves_the_folder_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "kv"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ConfigError, match="kv: can't be written: No space left on device"):
            Occupied(folder, b"x", keep=True)
    Occupied(folder, b"x", keep=True).leave()
