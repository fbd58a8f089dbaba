"""How old results are, by the history of this repository.

A result is older than the code once a file of the product that its script exercises differs between the result's commit and
the working tree. The tree counts, and not the latest commit, so that a change and the renewed pages fit into one commit. Once
older, a result stays older until it is measured again: the pages change with the first such commit and not with each.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path

from benchmarks.lib.environment import ROOT

_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class Age(Enum):
    """How a result's commit relates to the code."""

    CURRENT = "current"
    OLDER = "older than the code"
    UNKNOWN = "commit unknown here"


class History:
    """A repository, as far as its clone goes back."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._ages = cache(self._age)

    @property
    def is_whole(self) -> bool:
        """Whether the clone has the whole history. One without git has none."""
        return self._git("rev-parse", "--is-shallow-repository") == "false"

    def age(self, commits: Sequence[str], folders: Sequence[str]) -> Age:
        """Return the age of a result of these commits whose script exercises these folders and files."""
        ages = {self._ages(commit, tuple(folders)) for commit in commits}
        return next(age for age in (Age.OLDER, Age.UNKNOWN, Age.CURRENT) if age in ages)

    def date(self, commit: str) -> str:
        """Return the day of a commit, empty if it is not known."""
        name = commit.partition("+")[0]
        return self._git("log", "-1", "--format=%cs", name) or "" if self._knows(name) else ""

    def _age(self, commit: str, folders: tuple[str, ...]) -> Age:
        name, plus, _ = commit.partition("+")
        if plus:
            return Age.OLDER  # what was measured is in no commit
        if not self._knows(name):
            return Age.UNKNOWN
        changed = self._git("diff", "--name-only", name, "--", *folders, ":(exclude)*.md")
        return Age.OLDER if changed else Age.CURRENT

    def _knows(self, name: str) -> bool:
        """Whether the commit is an ancestor of the latest one, or that one."""
        return _COMMIT.fullmatch(name) is not None and self._git("merge-base", "--is-ancestor", name, "HEAD") is not None

    def _git(self, *words: str) -> str | None:
        """What git says; None if it fails, or is not there."""
        try:
            done = subprocess.run(["git", *words], cwd=self._root, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()
