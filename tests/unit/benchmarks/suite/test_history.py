"""How old results are, in small repositories of our own: whole ones, shallow ones, and none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.lib.environment import ROOT
from benchmarks.suite.history import Age, History, meaning

ENVIRONMENT = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *ENVIRONMENT, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Write files, whose names have __ for / and _ for the dot, and return the commit."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")
    return git(folder, "rev-parse", "--short=12", "HEAD")


def made(folder: Path) -> History:
    """The packages are the folders of the root."""
    return History(folder, lambda path: path.partition("/")[0] if "/" in path else "")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


def test_a_result_is_older_once_a_file_that_it_exercises_has_changed(repository: Path) -> None:
    first = commit(repository, engine__step_py="1", router__app_py="1")
    second = commit(repository, router__app_py="2", engine__notes_md="words")
    history = made(repository)
    assert history.is_whole
    assert history.age([first], ["engine"]) is Age.CURRENT, "a page is no code"
    assert history.age([first], ["engine", "router"]) is Age.OLDER
    assert history.age([second], ["engine", "router"]) is Age.CURRENT
    assert history.age([second, first], ["router"]) is Age.OLDER, "any of them"


def test_what_is_not_committed_yet_counts(repository: Path) -> None:
    """So the pages can be renewed in the commit that makes results older."""
    first = commit(repository, engine__step_py="1")
    (repository / "engine" / "step.py").write_text("2")
    assert made(repository).age([first], ["engine"]) is Age.OLDER


def test_code_that_is_again_as_it_was_is_current(repository: Path) -> None:
    first = commit(repository, engine__step_py="1")
    commit(repository, engine__step_py="2")
    commit(repository, engine__step_py="1")
    assert made(repository).age([first], ["engine"]) is Age.CURRENT


def test_a_tree_with_changes_is_older_and_a_foreign_commit_unknown(repository: Path) -> None:
    first = commit(repository, engine__step_py="1")
    git(repository, "checkout", "-q", "-b", "side")
    side = commit(repository, engine__step_py="2")
    git(repository, "checkout", "-q", "main")
    history = made(repository)
    assert history.age([f"{first}+changes"], ["engine"]) is Age.OLDER
    for name in (side, "0123456789ab", "unknown: no repository", "HEAD", "--help"):
        assert history.age([name], ["engine"]) is Age.UNKNOWN, name
    assert history.age([first, "0123456789ab"], ["engine"]) is Age.UNKNOWN


def test_a_shallow_clone_knows_no_more_than_it_has(repository: Path, tmp_path: Path) -> None:
    first = commit(repository, engine__step_py="1")
    second = commit(repository, engine__step_py="2")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    history = made(tmp_path / "shallow")
    assert not history.is_whole
    assert history.age([first], ["engine"]) is Age.UNKNOWN, "not older: nobody here can tell"
    assert history.age([second], ["engine"]) is Age.CURRENT


def test_without_a_repository_all_is_unknown(tmp_path: Path) -> None:
    history = made(tmp_path)
    assert not history.is_whole
    assert history.age(["0123456789ab"], ["engine"]) is Age.UNKNOWN


def test_words_are_no_code(repository: Path) -> None:
    first = commit(repository, engine__step_py='"""Says one."""\n\ndef f() -> int:\n    return 1  # one\n')
    commit(repository, engine__step_py='"""Says it better."""\n\ndef f() -> int:\n    """One."""\n    return 1\n')
    assert made(repository).age([first], ["engine"]) is Age.CURRENT
    commit(repository, engine__step_py='"""Says it better."""\n\ndef f() -> int:\n    """One."""\n    return 2\n')
    assert made(repository).age([first], ["engine"]) is Age.OLDER


def test_what_is_new_gone_or_no_python_counts(repository: Path) -> None:
    first = commit(repository, engine__step_py="1", engine__native__step_cpp="1")
    commit(repository, engine__more_py="")
    assert made(repository).age([first], ["engine"]) is Age.OLDER
    (repository / "engine" / "more.py").unlink()
    assert made(repository).age([first], ["engine"]) is Age.CURRENT
    (repository / "engine" / "native" / "step.cpp").write_text("1 // a word")
    assert made(repository).age([first], ["engine"]) is Age.OLDER


def test_another_version_of_a_dependency_counts_for_everything(repository: Path) -> None:
    (repository / "requirements.lock").write_text("mkdocs==1\ntorch==2.12.0\n")
    first = commit(repository, engine__step_py="1")
    (repository / "requirements.lock").write_text("mkdocs==2\ntorch==2.12.0\n")
    assert made(repository).age([first], ["engine"]) is Age.CURRENT
    (repository / "requirements.lock").write_text("mkdocs==2\ntorch==2.13.0\n")
    assert made(repository).age([first], ["engine"]) is Age.OLDER
    lock = (ROOT / "requirements.lock").read_text()
    assert {"torch", "ray", "numpy"} <= {line.partition("==")[0] for line in meaning("requirements.lock", lock).splitlines()}


@pytest.mark.parametrize("command", ["diff", "show"])
def test_what_git_can_not_say_is_unknown(command: str, repository: Path) -> None:
    """As in a clone that has commits and lacks files, with no network."""

    class Failing(History):
        def _git(self, *words: str) -> str | None:
            return None if words[0] == command else super()._git(*words)

    first = commit(repository, engine__step_py="1")
    commit(repository, engine__step_py="2")
    history = Failing(repository, lambda path: "engine")
    assert history.age([first], ["engine"]) is Age.UNKNOWN
