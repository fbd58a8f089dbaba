"""The measures of the house, taken from the code: short functions, small folders, no circle of imports.

Product code is what is installed: the packages that pyproject.toml lists.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
MOST_LINES = 80
MOST_NESTED = 4
MOST_FILES = 16

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def folder(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def modules() -> dict[str, Path]:
    """The path of each module by its name; a package has the name of its folder."""
    found = {}
    for package in PACKAGES:
        for path in folder(package).glob("*.py"):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def bodies(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], int]]:
    """The blocks inside a statement, each with how much deeper it is. An elif is no deeper than its if."""
    if isinstance(statement, _DEFINITIONS):
        return  # measured by itself
    for name in ("body", "orelse", "finalbody"):
        block: list[ast.stmt] = getattr(statement, name, [])
        is_elif = name == "orelse" and isinstance(statement, ast.If) and len(block) == 1 and isinstance(block[0], ast.If)
        yield block, 0 if is_elif else 1
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body, 1


def depth(block: list[ast.stmt]) -> int:
    """How many blocks (if, for, while, with, try, match) lie inside each other at the deepest place."""
    return max((deeper + depth(inner) for each in block for inner, deeper in bodies(each) if inner), default=0)


def too_large(tree: ast.Module) -> list[str]:
    """The functions that are longer or more nested than is allowed, with their measures."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            nested = depth(node.body)
            if lines > MOST_LINES or nested > MOST_NESTED:
                found.append(f"{node.lineno} {node.name}: {lines} lines, nested {nested} deep")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short_and_flat(package: str) -> None:
    wrong = [f"{path.relative_to(ROOT)}:{each}" for path in folder(package).glob("*.py") for each in too_large(parsed(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_are_small(package: str) -> None:
    """Files with data count too. `__init__.py` does not: every package has one, and most say only what the package is."""
    files = [path.name for path in folder(package).iterdir() if path.is_file()]
    own = sorted(name for name in files if name != "__init__.py" and not name.startswith(".") and not name.endswith(".pyc"))
    assert len(own) <= MOST_FILES, f"{package} has {len(own)} files: {', '.join(own)}"


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Names of the modules that a file imports, at its top or inside a function, but not those for the type checker alone."""
    for_types = {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found.add(name if name in known else node.module)
    return found & known.keys()


def test_imports_go_in_no_circle() -> None:
    """Imports inside functions count too: they are there for what is slow to import, not to hide a circle."""
    known = modules()
    graph = {name: imported(path, known) for name, path in known.items()}
    assert circle(graph) is None


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Names that import each other in turn, the first one again at the end; None if there are none."""
    done: set[str] = set()
    way: list[str] = []

    def visit(name: str) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        way.append(name)
        found = next((each for below in sorted(graph[name]) if (each := visit(below)) is not None), None)
        way.pop()
        done.add(name)
        return found

    return next((each for name in sorted(graph) if (each := visit(name)) is not None), None)


def test_the_measures_themselves() -> None:
    flat = "def f():\n  if a:\n    pass\n  elif b:\n    pass\n  elif c:\n    pass\n"
    assert too_large(ast.parse(flat)) == []
    deep = "async def f():\n for a in b:\n  with c:\n   while d:\n    try:\n     pass\n    except e:\n     if g:\n      pass\n"
    assert too_large(ast.parse(deep)) == ["1 f: 9 lines, nested 5 deep"]
    match = "def f():\n match a:\n  case 1:\n   with b:\n    if c:\n     for d in e:\n      if g:\n       pass\n"
    assert too_large(ast.parse(match)) == ["1 f: 8 lines, nested 5 deep"]
    assert too_large(ast.parse("def f():\n" + " pass\n" * 80)) == ["1 f: 81 lines, nested 0 deep"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
