"""requirements.lock has a version of everything that pyproject.toml asks for, within its ranges, and says versions only."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "requirements.lock").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT_BY_TORCH = "triton"
"""The CUDA build of torch asks for one version of it, the CPU build for none."""
WANTED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]


def locked() -> dict[str, Version]:
    pairs = (line.split("==") for line in LINES)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_lock_holds_names_and_public_versions_only() -> None:
    """Where packages come from, and which build of torch, is the machine's business."""
    for line in LINES:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.!]*", line), line
    assert len(locked()) == len(LINES), "a package is listed twice"
    assert BROUGHT_BY_TORCH not in locked()


@pytest.mark.parametrize("wanted", [each for each in WANTED if not each.startswith(("tandem[", BROUGHT_BY_TORCH))])
def test_every_dependency_is_locked_within_its_range(wanted: str) -> None:
    requirement = Requirement(wanted)
    version = locked().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is not locked; run `make update`"
    assert requirement.specifier.contains(version, prereleases=True), f"{version} is not in {requirement}; run `make update`"
