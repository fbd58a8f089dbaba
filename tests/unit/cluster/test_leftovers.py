"""Folders of runs: those of killed processes go, those of living ones and of strangers stay."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.ray.leftovers import KEPT_SESSIONS, claim, is_left, remove_leftovers

CLAIM = """
import sys
from pathlib import Path
from cluster.ray.leftovers import claim
locks = [claim(Path(folder)) for folder in sys.argv[1:]]
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner_of(*folders: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed these folders. It is killed at the end."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "haproxy.cfg").touch()
    command = [sys.executable, "-c", CLAIM, *map(str, folders)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_a_killed_run_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    killed, living = tmp_path / "tandem-killed", tmp_path / "tandem-living"
    stranger, link = tmp_path / "tandem-stranger", tmp_path / "tandem-link"
    stranger.mkdir()
    with owner_of(living):
        with owner_of(killed):
            assert not is_left(killed)
            assert remove_leftovers(tmp_path, tmp_path / "ray") == []
        link.symlink_to(killed)
        assert remove_leftovers(tmp_path, tmp_path / "ray") == [killed]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["tandem-link", "tandem-living", "tandem-stranger"]


def test_the_latest_sessions_keep_their_logs(tmp_path: Path) -> None:
    sessions = [tmp_path / "ray" / f"session_2026-11-{day:02}" for day in range(1, KEPT_SESSIONS + 3)]
    with owner_of(*sessions):
        pass
    foreign = tmp_path / "ray" / "session_2026-10-01"
    foreign.mkdir()
    assert sorted(remove_leftovers(tmp_path, tmp_path / "ray")) == sessions[:2]
    assert foreign.exists()


def test_a_folder_that_was_given_up_is_left(tmp_path: Path) -> None:
    with claim(tmp_path):
        assert not is_left(tmp_path)
    assert is_left(tmp_path)
