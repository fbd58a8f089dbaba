"""What every result file says about where it came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.native.build import load_library

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""As Linux names them. Many processors have the same name, and differ in these."""
_NOT_MEASURED = (":!benchmarks/results", ":!*.md")
"""What git does not look at for changes: results and pages, which do not change what is measured."""


def environment() -> dict[str, Any]:
    """Describe this machine: processor, cores, memory, versions, and the commit with a mark if the tree differs from it."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),
        "commit": commit(),
    }


def operators() -> str:
    """Return the set of native operators that bfloat16 is computed with here, or `torch`: part of the names of results that
    depend on it.
    """
    built = load_library(torch.bfloat16)
    return "torch" if built is None else built.instruction_set.name


def write_result(name: str, result: dict[str, Any], table: str) -> None:
    """Write `benchmarks/results/NAME.json` and `NAME.md`, and print the table."""
    save_result(name, result, table)
    print(table)


def save_result(name: str, result: dict[str, Any], table: str) -> None:
    """Write `benchmarks/results/NAME.json` and `NAME.md`."""
    RESULTS.mkdir(exist_ok=True)
    result = {**result, "environment": environment()}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in result["environment"].items())
    (RESULTS / f"{name}.md").write_text(f"{table}\n\n{where}\n")


def processor(cpuinfo: str) -> str:
    """The processor's name and which of the features it has that decide about speed, from the text of /proc/cpuinfo."""
    parts = [line.partition(":") for line in cpuinfo.splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in reversed(parts)}  # of the first core
    flags = fields.get("flags", "").split()
    features = "/".join(feature for feature in _FEATURES if feature in flags)
    return fields.get("model name", platform.machine()) + (f" ({features})" if features else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """Return the commit of this tree, with `+changes` behind it if the tree differs from it in more than pages and results."""
    try:
        changes = _git("status", "--porcelain", "-uno", "--", ".", *_NOT_MEASURED)
        return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no repository"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
