"""How old results are, by the history of this repository. `make bench` and the pages of results ask the same question.

A result is older than the code once something of the product that its script exercises differs between the result's commit and
the working tree. Pages, comments and docstrings are no such thing, nor are versions of packages that the product does not
depend on. The tree counts, and not the latest commit, so that a change and the renewed pages fit into one commit. Once older,
a result stays older until it is measured again: the pages change with the first such commit and not with each.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import cache
from pathlib import Path

from benchmarks.lib.environment import ROOT
from benchmarks.suite.exercised import LOCK, package_of

_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Age(Enum):
    """How a result's commit relates to the code."""

    CURRENT = "current"
    OLDER = "older than the code"
    UNKNOWN = "commit unknown here"


class History:
    """A repository, as far as its clone goes back. `package_of` says to which package of the product a file belongs."""

    def __init__(self, root: Path = ROOT, package_of: Callable[[str], str] = package_of) -> None:
        self._root = root
        self._package_of = package_of
        self._ages = cache(self._age)
        self._changed = cache(self._changed_files)
        self._differs = cache(self._differs_now)

    @property
    def is_whole(self) -> bool:
        """Whether the clone has the whole history. One without git has none."""
        return self._git("rev-parse", "--is-shallow-repository") == "false\n"

    def age(self, commits: Iterable[str], packages: Collection[str]) -> Age:
        """Return the age of a result of these commits whose script exercises these packages."""
        ages = {self._ages(commit, frozenset(packages)) for commit in commits}
        return next(age for age in (Age.OLDER, Age.UNKNOWN, Age.CURRENT) if age in ages)

    def _age(self, commit: str, packages: frozenset[str]) -> Age:
        name, plus, _ = commit.partition("+")
        if plus:
            return Age.OLDER  # what was measured is in no commit
        if not self._knows(name):
            return Age.UNKNOWN
        changed = self._changed(name)
        if changed is None:
            return Age.UNKNOWN
        wanted = [file for file in changed if file == LOCK or self._package_of(file) in packages]
        is_unknown = False
        for file in sorted(wanted, key=lambda file: file.endswith(".py")):
            differs = self._differs(name, file)
            if differs:
                return Age.OLDER
            is_unknown = is_unknown or differs is None
        return Age.UNKNOWN if is_unknown else Age.CURRENT

    def _changed_files(self, commit: str) -> Sequence[str] | None:
        """The files that differ between the commit and the tree, but for pages."""
        found = self._git("diff", "--name-only", "--no-renames", "-z", commit, "--", ".", ":(exclude)*.md")
        return None if found is None else [file for file in found.split("\0") if file]

    def _differs_now(self, commit: str, file: str) -> bool | None:
        """Whether a changed file differs in what is measured; None if git can't say what it was."""
        if not (file.endswith(".py") or file == LOCK) or not (self._root / file).exists():
            return True
        if not self._git("ls-tree", "--name-only", commit, "--", file):
            return True
        before = self._git("show", f"{commit}:{file}")
        return None if before is None else meaning(file, before) != meaning(file, (self._root / file).read_text())

    def _knows(self, name: str) -> bool:
        """Whether the commit is an ancestor of the latest one, or that one."""
        return _COMMIT.fullmatch(name) is not None and self._git("merge-base", "--is-ancestor", name, "HEAD") is not None

    def _git(self, *words: str) -> str | None:
        """What git says; None if it fails, or is not there."""
        try:
            done = subprocess.run(["git", *words], cwd=self._root, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None
        return done.stdout


def meaning(file: str, text: str) -> str:
    """Return what of a file decides about measurements: code without comments and docstrings, versions of dependencies."""
    if file == LOCK:
        return "\n".join(line for line in text.splitlines() if _package(line) in _dependencies())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # strings that stand alone do nothing; of a body of nothing else something must stay
            node.body = [each for each in body if not _is_words(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def _dependencies() -> frozenset[str]:
    """The packages that the product depends on, without its extras."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return frozenset(_package(line) for line in listed)


def _package(line: str) -> str:
    found = _NAME.match(line.replace(".", "-"))
    return found[0].lower().replace("_", "-") if found else ""
