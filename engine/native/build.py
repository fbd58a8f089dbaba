"""Compiles the native operators once and keeps the library in the cache folder.

They are used where the processor has AVX-512 with bfloat16 products and a C++ compiler is at hand ($CXX, g++ or c++);
everywhere else the engine computes with torch's operators. A library is known by its sources, the compiler, its options
and the processor's features, so that a cache shared by different machines holds one for each.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from configs.cache import cache_dir, exclusive
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
"""OpenMP's library has the name of the one that torch has loaded, so both share one pool of threads."""
_FEATURES = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_bf16")
_COMPILE_S = 120.0


@cache
def load_library() -> ctypes.CDLL | None:
    """The library, built if need be; None where it can't be used, with a line in the log if that is a pity."""
    capabilities = torch.cpu.get_capabilities()
    if not all(capabilities.get(feature) for feature in _FEATURES):
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        log.warning("no C++ compiler was found: decoding will be slower than it could be")
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        log.warning("the native operators can't be used, decoding will be slower: %s", _first_line(error))
        return None


def _built(compiler: str) -> Path:
    sources = sorted(_SOURCES.glob("*.cpp"))
    folder = cache_dir() / "native"
    path = folder / f"{_key(compiler, [*sources, *_SOURCES.glob('*.h')])}.so"
    if path.exists():
        return path
    with exclusive(folder):
        if not path.exists():
            log.info("compiling the native operators")
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / path.name
                command = [compiler, *_OPTIONS, "-o", str(built), *map(str, sources)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
                built.replace(path)
    return path


def _key(compiler: str, files: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_S).stdout
    features = sorted(torch.cpu.get_capabilities().items())
    digest = hashlib.sha256(version + repr((_OPTIONS, features, _processor())).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What `-march=native` depends on, as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (said or str(error)).strip().partition("\n")[0]
