"""Where the files of the compiled native operators lie. Needs no torch.

A library is known by its sources, the compiler and its options, so that a cache shared by different machines holds one for
each.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

from configs.cache import cache_dir
from engine.native.instruction_sets import COMPILED, HERE, InstructionSet, find_compiler

FORCED = "TANDEM_NATIVE"
"""Environment variable that names the set to use."""
_VERSION_S = 20.0
"""Deadline for the compiler to say its version."""


def library_path(instruction_set: InstructionSet) -> Path | None:
    """Return the path of a set's library, which need not exist: in a wheel, else in the cache folder; None without a compiler.

    Raises OSError or subprocess.SubprocessError if the compiler can't say its version.
    """
    carried = HERE / COMPILED / instruction_set.file_name
    if carried.exists():
        return carried
    compiler = find_compiler()
    if compiler is None:
        return None
    return cache_dir() / "native" / f"{_version_digest(compiler)}-{instruction_set.file_name}"


def is_at_hand(instruction_set: InstructionSet) -> bool:
    """Return whether a set need not be compiled any more. Whether the processor has it is not asked."""
    try:
        path = library_path(instruction_set)
    except (OSError, subprocess.SubprocessError):
        return False  # a compiler that does not work has made nothing
    return path is not None and os.path.exists(path)


@cache
def _version_digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_VERSION_S).stdout
    return hashlib.sha256(version).hexdigest()[:8]
