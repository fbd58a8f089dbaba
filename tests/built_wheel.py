"""The distribution, built from this checkout and unpacked into a folder, as somebody would get it who has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from engine.native.instruction_sets import find_compiler

ROOT = Path(__file__).parents[1]
PACKAGES: tuple[str, ...] = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"],
)
TOP_PACKAGES = sorted({name.partition(".")[0] for name in PACKAGES})
_DEADLINE_S = 300.0
_HIDE_CHECKOUT = """\
import os, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != {root!r}]
"""
"""Run by every process at its start: an editable installation is a finder, or an entry of the path."""


def product_files() -> set[str]:
    """Every file of the packages, code and data, by its path in the checkout."""
    files = (path for package in TOP_PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def build_wheel(folder: Path) -> Path:
    """The wheel, built in `folder` from a copy of the sources: what earlier builds left in the checkout stays out of it.

    It is built as for a release, with every set of native operators, unless there is no compiler.
    Needs no index: torch depends on setuptools, which is the whole of the build's own needs.
    """
    sources = folder / "sources"
    for name in product_files() | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}:
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    strict = "" if find_compiler() is None else "1"
    arguments = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    _pip("wheel", *arguments, TANDEM_ALL_OPERATORS=strict)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Install the wheel into `folder`, so that processes with `environment(folder)` find it and never the checkout.

    Returns the command `tandem`.
    """
    _pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    (folder / "sitecustomize.py").write_text(_HIDE_CHECKOUT.format(root=os.path.realpath(ROOT)))
    return folder / "bin" / "tandem"


def environment(folder: Path) -> dict[str, str]:
    """What processes need that use the Tandem in `folder`; whatever else they import comes from this environment."""
    return {"PYTHONPATH": str(folder)}


def run(folder: Path, cwd: Path, *command: str, **variables: str) -> str:
    """What a command says on stdout that uses the Tandem in `folder`, with these variables in its environment."""
    variables = os.environ | environment(folder) | variables
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
