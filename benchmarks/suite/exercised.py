"""Which folders of the product a benchmark exercises: what its script imports, and what it starts in other processes.

Imports are read, not run: those of the script, of what it imports, and so on, also those within functions. A folder is
exercised with all files that lie in it, and with those below that belong to no package of their own, such as kernels.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.lib.environment import ROOT
from benchmarks.suite.part import Part

LOCK = "requirements.lock"
"""Exercised by everything: the versions of what the product imports."""
NOT_EXERCISED = ("router/page", "cluster/commands/top")
"""What a cluster has beside, and no request passes through: its pages."""


@cache
def product() -> frozenset[str]:
    """Return the packages of the product, as paths."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return frozenset(name.replace(".", "/") for name in listed if not name.startswith(("benchmarks", "tests")))


@cache
def exercised(part: Part) -> frozenset[str]:
    """Return the packages of the product, as paths, whose changes make the part's results older than the code."""
    found = {file.rpartition("/")[0] for file in _reached(_script(part))} if part.module else set()
    found |= {package for package in product() for folder in part.starts if (package + "/").startswith(folder + "/")}
    left_out = {package for package in product() for folder in NOT_EXERCISED if (package + "/").startswith(folder + "/")}
    return frozenset(found) & product() - left_out


def package_of(path: str) -> str:
    """Return the package of the product that a file belongs to, or an empty string. The file need not be there any more."""
    folder = path.rpartition("/")[0]
    while folder and folder not in product():
        folder = folder.rpartition("/")[0]
    return folder


def _script(part: Part) -> str:
    """The script's file. That of pytest is the tests' file among its arguments."""
    if part.module == "pytest":
        return next(word for word in part.arguments if word.endswith(".py"))
    file = _file(str(part.module))
    assert file is not None, part.module
    return file


def _reached(script: str) -> set[str]:
    """All files of this repository that are imported from this one, itself included."""
    seen: set[str] = set()
    left = [script]
    while left:
        file = left.pop()
        if file not in seen:
            seen.add(file)
            left += imported(file)
    return seen


@cache
def imported(file: str) -> frozenset[str]:
    """Return the files of this repository that one file imports. Importing a module imports the packages around it, too."""
    names = set(_names(ast.parse((ROOT / file).read_text()), file))
    around = {".".join(parts[:n]) for parts in (name.split(".") for name in names) for n in range(1, len(parts) + 1)}
    return frozenset(found for name in around if (found := _file(name)) is not None)


def _names(tree: ast.Module, file: str) -> Iterator[str]:
    """The names of modules, and of what is taken from them, which may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _file(module: str) -> str | None:
    """The file of a module, relative to the root; None for one that is not of this repository."""
    path = Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / file).exists():
            return file.as_posix()
    return None
