"""What `ray_cluster.yaml` puts into the environment of every node, which every other way to start Ray has to do as well."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def exported(path: Path) -> dict[str, str]:
    """The variables that a file for `ray up` exports in its setup commands."""
    setup = "\n".join(yaml.safe_load(path.read_text())["setup_commands"])
    lines = [line for line in setup.splitlines() if line.startswith("export ")]
    return dict(re.findall(r"(\w+)=(\S+)", "\n".join(lines)))


@cache
def wanted() -> dict[str, str]:
    """The variables of `ray_cluster.yaml`."""
    return exported(ROOT / "ray_cluster.yaml")


def fixed() -> dict[str, str]:
    """Those of them that have the same value on every machine: no path."""
    return {name: value for name, value in wanted().items() if "$" not in value}
