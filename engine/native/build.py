"""Compiles the native operators once and keeps the library in the cache folder.

There is a set for each of several instruction sets, in a folder of its own. The first that the processor has and that computes
in the wanted type is used, if a C++ compiler is at hand ($CXX, g++ or c++); everywhere else the engine computes with torch's
operators. So float32 is computed by the set for AVX2 on all of these processors, with the same bits. A library is known by
its sources, the compiler, its options and, where these ask for it, the processor, so that a cache shared by different machines
holds one for each.

    TANDEM_NATIVE=avx2    # use this set, though the processor may have a better one
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from configs.cache import cache_dir, exclusive
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_OPTIONS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
"""OpenMP's library has the name of the one that torch has loaded, so both share one pool of threads."""
_COMPILE_S = 120.0
FORCED = "TANDEM_NATIVE"
"""Environment variable that names the set to use."""


@dataclass(frozen=True)
class InstructionSet:
    """The operators for one kind of processor. They lie in the folder of this name."""

    name: str
    features: tuple[str, ...]
    """Features that the processor must have, by their names in `torch.cpu.get_capabilities`."""
    options: tuple[str, ...]
    """Options that the C++ compiler gets for these sources."""
    dtypes: tuple[torch.dtype, ...]
    """Types that it computes in."""
    any_rows: bool
    """Whether its products take any number of rows, and bfloat16 matrices too. If not, oneDNN computes the others."""

    @property
    def is_here(self) -> bool:
        """Whether this machine's processor has all features of the instruction set."""
        capabilities = torch.cpu.get_capabilities()
        return all(capabilities.get(feature) for feature in self.features)


INSTRUCTION_SETS = (
    InstructionSet(
        name="avx512",
        features=("avx512_f", "avx512_bw", "avx512_vl", "avx512_bf16"),
        options=("-march=native",),
        dtypes=(torch.bfloat16,),
        any_rows=False,
    ),
    InstructionSet(
        name="avx2",
        features=("avx2", "fma3", "f16c"),
        options=("-mavx2", "-mfma", "-mf16c", "-ffp-contract=off"),
        dtypes=(torch.bfloat16, torch.float32),
        any_rows=True,
    ),
)
"""The best first."""


@dataclass(frozen=True)
class Built:
    """A loaded library."""

    instruction_set: InstructionSet
    functions: ctypes.CDLL


def chosen_instruction_set(dtype: torch.dtype) -> InstructionSet | None:
    """Return the set that computes in `dtype` on this machine; None if none does.

    Raises ConfigError if TANDEM_NATIVE names a set that this processor does not have.
    """
    here = [each for each in INSTRUCTION_SETS if each.is_here]
    forced = os.environ.get(FORCED)
    if forced and forced not in [each.name for each in here]:
        names = ", ".join(each.name for each in here) or "none"
        raise ConfigError(f"{FORCED}={forced} names no instruction set of this processor, which has: {names}", param=FORCED)
    return next((each for each in here if dtype in each.dtypes and forced in (None, "", each.name)), None)


@cache
def load_library(dtype: torch.dtype) -> Built | None:
    """Return the library that computes in `dtype`, built if need be; None where there is none, or where it can't be used, with
    a line in the log if that is a pity.
    """
    instruction_set = chosen_instruction_set(dtype)
    if instruction_set is None:
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.warning("no C++ compiler was found: decoding will be slower than it could be")
        return None
    try:
        return Built(instruction_set, ctypes.CDLL(str(_built(compiler, instruction_set))))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.warning("the native operators can't be used, decoding will be slower: %s", _first_line(error))
        return None


def _built(compiler: str, instruction_set: InstructionSet) -> Path:
    sources = _SOURCES / instruction_set.name
    folder = cache_dir() / "native"
    path = folder / f"{_key(compiler, instruction_set, sorted(sources.iterdir()))}.so"
    if path.exists():
        return path
    with exclusive(folder):
        if not path.exists():
            log.info("compiling the native operators for %s", instruction_set.name)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / path.name
                command = [compiler, *_OPTIONS, *instruction_set.options, "-o", str(built), *map(str, sources.glob("*.cpp"))]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
                built.replace(path)
    return path


def _key(compiler: str, instruction_set: InstructionSet, files: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_S).stdout
    digest = hashlib.sha256(version + repr((_OPTIONS, instruction_set)).encode())
    if "-march=native" in instruction_set.options:
        digest.update(_processor().encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What `-march=native` depends on, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (said or str(error)).strip().partition("\n")[0]
