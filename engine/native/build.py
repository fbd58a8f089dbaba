"""Finds the native operators for this machine, or compiles them once and keeps the library in the cache folder.

There is a set for each of several instruction sets. The first one is used that the processor has, that is the best choice
there, and that computes in the wanted type. It has to come compiled with a wheel, or a C++ compiler has to be at hand ($CXX,
g++ or c++). Everywhere else the engine computes with torch's operators. Other sets of the same arithmetic may take over single
products, where they were measured to be faster (`engine.profiling`).

    TANDEM_NATIVE=avx2    # use this set, though the processor may have a better one
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from configs.cache import exclusive
from configs.machine import processor_maker
from engine.native.files import FORCED, is_at_hand, is_whole, library_path, note_loading
from engine.native.instruction_sets import INSTRUCTION_SETS, InstructionSet, find_compiler, what_failed
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A library of native operators that was compiled and loaded."""

    instruction_set: InstructionSet
    functions: Any
    """Its functions as attributes, as `ctypes.CDLL` has them."""

    @property
    def arithmetic(self) -> str:
        """Name of its arithmetic: `arithmetic_of`."""
        return arithmetic_of(self.instruction_set)


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
    candidates = instruction_sets(dtype)
    found = next((built for each in candidates if (built := _load(each)) is not None), None)
    if candidates:
        note_loading(succeeded=found is not None)
    return found


def load_alike(dtype: torch.dtype, *, compile_missing: bool = False) -> list[Built]:
    """Return all libraries that give the bits of `load_library`'s, that one first; none where there is none.

    Those that would have to be compiled are left out, unless `compile_missing`: that takes half a minute.
    """
    first = load_library(dtype)
    if first is None:
        return []
    others = [
        _load(each)
        for each in instruction_sets(dtype)
        if each != first.instruction_set and arithmetic_of(each) == first.arithmetic and (compile_missing or is_at_hand(each))
    ]
    return [first, *(built for built in others if built is not None)]


def arithmetic_of(instruction_set: InstructionSet) -> str:
    """Return the set's own name, such as `amx`, or that of several, `fma`; with the processor's maker where it decides bits."""
    name = instruction_set.arithmetic or instruction_set.name
    maker = processor_maker() if instruction_set.rounds_by_maker else ""
    return f"{name}-{maker}" if maker else name


def _load(instruction_set: InstructionSet) -> Built | None:
    """The set's library, compiled if need be. None, and a line in the log, if it can't be had."""
    try:
        path = _compiled(instruction_set)
        return None if path is None else Built(instruction_set, ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.warning(
            "the native operators for %s can't be used, the engine will be slower: %s", instruction_set.name, what_failed(error)
        )
        return None


def _compiled(instruction_set: InstructionSet) -> Path | None:
    """The file of a wheel, or one that is compiled here; None without a compiler."""
    path = library_path(instruction_set)
    if path is None:
        log.warning("no C++ compiler was found: the engine will be slower than it could be")
        return None
    if is_whole(path):
        return path
    compiler = find_compiler()
    assert compiler is not None, "a path in the cache folder is named after it"
    with exclusive(path.parent):
        if not is_whole(path):
            if path.exists():
                log.warning("%s is damaged", path.name)
            log.info("compiling the native operators for %s", instruction_set.name)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                instruction_set.compile(compiler, built)
                with built.open("rb") as file:
                    os.fsync(file.fileno())  # or a loss of power could leave the name without the contents
                built.replace(path)
    return path
