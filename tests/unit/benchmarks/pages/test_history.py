"""How old results are, in small repositories of our own: whole ones, shallow ones, and none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.pages.history import Age, History

ENVIRONMENT = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *ENVIRONMENT, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Write files, whose names have __ for / and _ for the dot, and return the commit."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")
    return git(folder, "rev-parse", "--short=12", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


def test_a_result_is_older_once_a_file_that_it_exercises_has_changed(repository: Path) -> None:
    first = commit(repository, engine__step_py="1", router__app_py="1")
    second = commit(repository, router__app_py="2", engine__notes_md="words")
    history = History(repository)
    assert history.is_whole
    assert history.age([first], ["engine"]) is Age.CURRENT, "a page is no code"
    assert history.age([first], ["engine", "router"]) is Age.OLDER
    assert history.age([second], ["engine", "router"]) is Age.CURRENT
    assert history.age([second, first], ["router"]) is Age.OLDER, "any of them"
    assert len(history.date(first)) == len("2026-11-26")


def test_what_is_not_committed_yet_counts(repository: Path) -> None:
    """So the pages can be renewed in the commit that makes results older."""
    first = commit(repository, engine__step_py="1")
    (repository / "engine" / "step.py").write_text("2")
    assert History(repository).age([first], ["engine"]) is Age.OLDER


def test_code_that_is_again_as_it_was_is_current(repository: Path) -> None:
    first = commit(repository, engine__step_py="1")
    commit(repository, engine__step_py="2")
    commit(repository, engine__step_py="1")
    assert History(repository).age([first], ["engine"]) is Age.CURRENT


def test_a_tree_with_changes_is_older_and_a_foreign_commit_unknown(repository: Path) -> None:
    first = commit(repository, engine__step_py="1")
    git(repository, "checkout", "-q", "-b", "side")
    side = commit(repository, engine__step_py="2")
    git(repository, "checkout", "-q", "main")
    history = History(repository)
    assert history.age([f"{first}+changes"], ["engine"]) is Age.OLDER
    for name in (side, "0123456789ab", "unknown: no repository", "HEAD", "--help"):
        assert history.age([name], ["engine"]) is Age.UNKNOWN, name
        assert history.date(name) == ""
    assert history.age([first, "0123456789ab"], ["engine"]) is Age.UNKNOWN


def test_a_shallow_clone_knows_no_more_than_it_has(repository: Path, tmp_path: Path) -> None:
    first = commit(repository, engine__step_py="1")
    second = commit(repository, engine__step_py="2")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    history = History(tmp_path / "shallow")
    assert not history.is_whole
    assert history.age([first], ["engine"]) is Age.UNKNOWN, "not older: nobody here can tell"
    assert history.age([second], ["engine"]) is Age.CURRENT


def test_without_a_repository_all_is_unknown(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert not history.is_whole
    assert history.age(["0123456789ab"], ["engine"]) is Age.UNKNOWN
