"""The sets of native operators, and how each is compiled. Needs nothing but Python: the build of a wheel imports it, too.

A wheel carries the compiled operators of every set, for machines without a compiler:

    build of the wheel ──► engine/native/compiled/<set>-<digest>.so        the digest is of the sources and the options
    checkout, source distribution ──► compiled at the first use            engine.native.build
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
COMPILED = "compiled"
"""Folder of a wheel's compiled operators, beside this file."""
_OPTIONS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w")
"""OpenMP's library has the name of the one that torch has loaded, so both share one pool of threads."""
_COMPILE_S = 300.0


@dataclass(frozen=True)
class InstructionSet:
    """The operators for one kind of processor. Their sources lie in the folder of this name, and in those it builds on."""

    name: str
    features: tuple[str, ...]
    """Features that the processor must have, by their names in `torch.cpu.get_capabilities`."""
    options: tuple[str, ...]
    """Options that the C++ compiler gets for these sources. They name the features, so the result is the same anywhere."""
    dtypes: tuple[str, ...]
    """Types that it computes in, by their names in torch."""
    builds_on: tuple[str, ...] = ()
    """Folders of the sources that this set's folder has no files of the same name for."""
    arithmetic: str = ""
    """Name of its arithmetic where several sets have the same; else it is the set's own name."""
    makers: tuple[str, ...] = ()
    """Makers on whose processors it is the best choice, if not on all: `configs.machine.processor_maker`."""
    tiles: bool = False
    """Whether it uses AMX's tiles, which a process must ask the system for."""
    records_by_output: bool = False
    """Whether packed quantized values are in the order of outputs, as amx/record.h says, and not of pairs of inputs."""
    rounds_by_maker: bool = False
    """Whether makers of processors are not known to round these instructions alike."""

    @property
    def file_name(self) -> str:
        """Name of the file of the compiled operators. It has the set's name, and a digest of the sources and the options."""
        digest = hashlib.sha256(repr((_OPTIONS, self)).encode())
        for folder in self._folders:
            for file in sorted(folder.iterdir()):
                digest.update(file.read_bytes())
        return f"{self.name}-{digest.hexdigest()[:24]}.so"

    def compile(self, compiler: str, target: Path) -> None:
        """Compile the operators into the file `target`. Raises OSError or subprocess.SubprocessError if that fails."""
        sources = {file.name: str(file) for folder in reversed(self._folders) for file in folder.glob("*.cpp")}
        includes = (f"-I{folder}" for folder in self._folders)
        command = [*command_words(compiler), *_OPTIONS, *self.options, *includes, "-o", str(target), *sorted(sources.values())]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        if not target.exists():
            raise FileNotFoundError(f"{compiler} made nothing")

    @property
    def _folders(self) -> list[Path]:
        """The own one first."""
        return [HERE / folder for folder in (self.name, *self.builds_on)]


_FMA, _FMA_OPTIONS = ("avx2", "fma3", "f16c"), ("-mavx2", "-mfma", "-mf16c", "-ffp-contract=off")
_AVX512 = InstructionSet(
    name="avx512",
    features=("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", *_FMA),
    options=("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512", *_FMA_OPTIONS),
    dtypes=("bfloat16", "float32"),
    builds_on=("fma", "scalar"),
    arithmetic="fma",
)
_AVX512_BF16 = InstructionSet(
    name="avx512_bf16",
    features=(*_AVX512.features, "avx512_bf16", "avx512_vnni"),
    options=(*_AVX512.options, "-mavx512bf16", "-mavx512vnni", "-mbmi", "-mbmi2", "-mlzcnt"),
    dtypes=("bfloat16",),
    builds_on=("avx512", "scalar"),
    makers=("amd",),  # Intel's need four times as long for one of these products as for one in float32, of half as many values
    rounds_by_maker=True,
)
INSTRUCTION_SETS = (
    InstructionSet(
        name="amx",
        features=(*_AVX512_BF16.features, "amx_tile", "amx_bf16"),
        options=(*_AVX512_BF16.options, "-mamx-tile", "-mamx-bf16"),
        dtypes=("bfloat16",),
        builds_on=("avx512_bf16", "avx512", "scalar"),
        tiles=True,
        records_by_output=True,
    ),
    _AVX512_BF16,
    _AVX512,
    InstructionSet(
        name="avx2",
        features=_FMA,
        options=_FMA_OPTIONS,
        dtypes=("bfloat16", "float32"),
        builds_on=("fma", "scalar"),
        arithmetic="fma",
    ),
)
"""Sets of instructions that the native operators are written for, the best first."""


def find_compiler() -> str | None:
    """Return the C++ compiler of this machine: $CXX, g++ or c++; None if there is none. It may be several words."""
    return os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("c++")


def command_words(compiler: str) -> list[str]:
    """Return the words of a compiler's command: one for a program that is there, several for `ccache g++` or `g++ -m64`."""
    return [compiler] if shutil.which(compiler) else compiler.split()


def what_failed(error: Exception) -> str:
    """Return the first line of what a compiler says, or of another error."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    return (said or str(error)).strip().partition("\n")[0]
