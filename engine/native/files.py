"""Where the files of the compiled native operators lie. Needs no torch.

A library is known by its sources, the compiler and its options, so that a cache shared by different machines holds one for
each.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from configs.cache import cache_dir
from engine.native.instruction_sets import COMPILED, HERE, INSTRUCTION_SETS, InstructionSet, command_words, find_compiler
from protocol.errors import ConfigError

FORCED = "TANDEM_NATIVE"
"""Environment variable that names the set to use."""
_VERSION_S = 20.0
"""Deadline for the compiler to say its version."""
_ELF64 = struct.Struct("<4s36xQ10xHH2x")
"""Header of a library: magic number, place of the table of sections, bytes of an entry, and their number."""


def library_path(instruction_set: InstructionSet) -> Path | None:
    """Return the path of a set's library: in a wheel, else in the cache folder, where it need not be; None without a compiler.

    Raises OSError or subprocess.SubprocessError if the compiler can't say its version.
    """
    carried = HERE / COMPILED / instruction_set.file_name
    if is_whole(carried):
        return carried
    compiler = find_compiler()
    if compiler is None:
        return None
    return cache_dir() / "native" / f"{_version_digest(compiler)}-{instruction_set.file_name}"


def can_be_had() -> bool:
    """Return whether there are native operators in a wheel, or a compiler that can make them.

    Not where none could be loaded the last time that a process tried with this compiler: it may make nothing, or libraries of
    the cache folder may not be run. Whether the processor has their instructions is not asked.
    """
    try:
        path = library_path(INSTRUCTION_SETS[-1])
        return path is not None and not _has_failed(path)
    except (OSError, subprocess.SubprocessError, ConfigError):
        return False


def note_loading(*, succeeded: bool) -> None:
    """Keep in the cache folder, if it can be written, whether any operators could be loaded: for `can_be_had`."""
    with suppress(OSError, subprocess.SubprocessError, ConfigError):
        path = library_path(INSTRUCTION_SETS[-1])
        if path is None:
            return
        failure = _failure(path)
        if succeeded:
            failure.unlink(missing_ok=True)
        else:
            failure.parent.mkdir(parents=True, exist_ok=True)
            failure.touch()


def is_at_hand(instruction_set: InstructionSet) -> bool:
    """Return whether a set need not be compiled any more. Whether the processor has it is not asked."""
    try:
        path = library_path(instruction_set)
    except (OSError, subprocess.SubprocessError):
        return False  # a compiler that does not work has made nothing
    return path is not None and is_whole(path)


def is_whole(library: Path) -> bool:
    """Return whether a library is there with all of its bytes. Whoever maps one that is cut off dies of it.

    An ELF file ends with the table of its sections, or behind it: https://refspecs.linuxfoundation.org/elf/elf.pdf.
    """
    try:
        with library.open("rb") as file:
            header, size = file.read(_ELF64.size), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF64.size:
        return False
    magic, table_at, entry_bytes, entries = _ELF64.unpack(header)
    return bool(magic == b"\x7fELF" and table_at + entry_bytes * entries <= size)


def _failure(library: Path) -> Path:
    """The file that is there where operators could not be loaded."""
    return cache_dir() / "native" / f"{library.name}.failed"


def _has_failed(library: Path) -> bool:
    try:
        return os.path.exists(_failure(library))  # Path's own raises for a folder that may not be entered
    except ConfigError:
        return False  # a wheel's operators need no cache folder


@cache
def _version_digest(compiler: str) -> str:
    program, *more = command_words(compiler)
    version = subprocess.run([program, *more, "--version"], check=True, capture_output=True, timeout=_VERSION_S).stdout
    return hashlib.sha256(version + " ".join(more).encode()).hexdigest()[:8]
