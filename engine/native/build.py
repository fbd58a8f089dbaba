"""Finds the native operators for this machine, or compiles them once and keeps the library in the cache folder.

There is a set for each of several instruction sets. The first that the processor has, that is the best choice there and that
computes in the wanted type is used, if it came compiled with a wheel, or if a C++ compiler is at hand ($CXX, g++ or c++);
everywhere else the engine computes with torch's operators. A library is known by its sources, the compiler and its options, so
that a cache shared by different machines holds one for each.

    TANDEM_NATIVE=avx2    # use this set, though the processor may have a better one
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from configs.cache import cache_dir, exclusive
from configs.machine import processor_maker
from engine.native.instruction_sets import COMPILED, HERE, INSTRUCTION_SETS, InstructionSet, find_compiler
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_VERSION_S = 20.0
"""Deadline for the compiler to say its version."""
FORCED = "TANDEM_NATIVE"
"""Environment variable that names the set to use."""


@dataclass(frozen=True)
class Built:
    """A loaded library."""

    instruction_set: InstructionSet
    functions: ctypes.CDLL

    @property
    def arithmetic(self) -> str:
        """The set's own, such as `amx`, or that of several, `fma`; with the processor's maker where it decides about bits."""
        name = self.instruction_set.arithmetic or self.instruction_set.name
        maker = processor_maker() if self.instruction_set.rounds_by_maker else ""
        return f"{name}-{maker}" if maker else name


def is_here(instruction_set: InstructionSet) -> bool:
    """Whether this machine's processor has all features of an instruction set, and its system lets this process use them."""
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(feature) for feature in instruction_set.features) and (
        not instruction_set.tiles or _may_use_tiles()
    )


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tiles, for all threads of this process. Sandboxes and old kernels refuse.

    Linux, Documentation/arch/x86/xstate.rst.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def instruction_sets(dtype: torch.dtype) -> list[InstructionSet]:
    """Return the sets that compute in `dtype` on this machine, the best first; only the one that TANDEM_NATIVE names, if any.

    Raises ConfigError if that is a set that this processor does not have.
    """
    here = [each for each in INSTRUCTION_SETS if is_here(each)]
    forced = os.environ.get(FORCED)
    if forced and forced not in [each.name for each in here]:
        names = ", ".join(each.name for each in here) or "none"
        raise ConfigError(f"{FORCED}={forced} names no instruction set of this processor, which has: {names}", param=FORCED)
    if forced:
        here = [each for each in here if each.name == forced]
    else:
        here = [each for each in here if processor_maker() in each.makers or not each.makers]
    return [each for each in here if str(dtype).removeprefix("torch.") in each.dtypes]


@cache
def load_library(dtype: torch.dtype) -> Built | None:
    """Return the best library that computes in `dtype`, built if need be; None where there is none.

    One that can't be used has a line in the log. An old compiler may know only some of a processor's instructions.
    """
    for instruction_set in instruction_sets(dtype):
        try:
            path = _compiled(instruction_set)
            if path is not None:
                return Built(instruction_set, ctypes.CDLL(str(path)))
        except (OSError, subprocess.SubprocessError, ConfigError) as error:
            log.warning(
                "the native operators for %s can't be used, the engine will be slower: %s",
                instruction_set.name,
                _first_line(error),
            )
    return None


def _compiled(instruction_set: InstructionSet) -> Path | None:
    """The file of a wheel, or one that is compiled here; None without a compiler."""
    carried = HERE / COMPILED / instruction_set.file_name
    if carried.exists():
        return carried
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C++ compiler was found: the engine will be slower than it could be")
        return None
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_VERSION_S).stdout
    folder = cache_dir() / "native"
    path = folder / f"{hashlib.sha256(version).hexdigest()[:8]}-{instruction_set.file_name}"
    if path.exists():
        return path
    with exclusive(folder):
        if not path.exists():
            log.info("compiling the native operators for %s", instruction_set.name)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / path.name
                instruction_set.compile(compiler, built)
                built.replace(path)
    return path


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (said or str(error)).strip().partition("\n")[0]
