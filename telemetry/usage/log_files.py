"""The files of the usage log, and their one writer.

    usage.jsonl.7   usage.jsonl.8   usage.jsonl          rotated files, numbered as they were begun, and the one that is written
    usage.jsonl.lock                                     held by the writer as long as it lives

    append: bytes at the end ──► fsync ──► they are there        the disk is full, or it fails otherwise ──► cut off again
    start:  what has no end of a line is cut off                 rotate: rename, begin another, fsync of the folder

A place in the log is the number of a file and an offset in it, and stays the same when the file is rotated. `end` is the place
up to which everything is on disk. What lies behind it is nobody's, until an append has succeeded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from protocol.errors import ConfigError
from telemetry.log_opening import LOG_MODE, open_log

_LONGEST_LINE = 64 * 1024
"""Bytes; those of ours have some hundreds."""
_BEGIN = b'{"id":'
"""How each of them begins (`telemetry.usage.event`)."""
_BLOCK = 64 * 1024
_ENDING_S, _AGAIN_S = 5.0, 0.05
"""Seconds that a cluster which has just been killed may take to be gone, and until it is looked at again."""
PARAM = "telemetry.usage_log"


class Place(NamedTuple):
    """A place in the log, between two lines."""

    number: int
    """Number of the log's file."""
    offset: int


class UsageLog:
    """The writer of the log, of which there is one at a time. Its methods block; `append` and `rotate` are for one thread."""

    def __init__(self, path: Path, least_number: int = 1, patience_s: float = 0.0) -> None:
        """Open the log, and cut off what a crash within a write has left. `least_number`: the file that is written has this
        number or a higher one. `patience_s`: so long another process may take to end.

        Raises ConfigError if another process writes the log, or if it can't be written.
        """
        self.path = path
        self._moving = threading.Lock()
        with _explained(path):
            self._lock = _locked(path, patience_s)
            try:
                rotated = rotated_files(path)
                number = max(least_number, rotated[-1][0] + 1 if rotated else 1)
                self._file, size = _opened(path)
                os.ftruncate(self._file, size)
                os.fsync(self._file)  # what is read from it now counts as being there
            except BaseException:
                os.close(self._lock)
                raise
        self.end = Place(number, size)

    def close(self) -> None:
        """Let another process write the log."""
        os.close(self._file)
        os.close(self._lock)

    def append(self, data: bytes) -> None:
        """Add whole lines. They are on disk when this returns. Raises OSError if they are not: then nothing was added."""
        number, size = self.end
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], size + written)
            os.fsync(self._file)
        except OSError:
            # If this fails, too, the next lines are written over it, or the next start cuts it off.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise
        self.end = Place(number, size + len(data))

    def rotate(self) -> None:
        """Begin another file. Raises OSError if that fails; then the former one is written on."""
        with self._moving:
            old, aside = self._file, self.path.with_name(f"{self.path.name}.{self.end.number}")
            with contextlib.suppress(FileNotFoundError):  # somebody has moved it
                os.rename(self.path, aside)
            try:
                self._file, _ = _opened(self.path)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(aside, self.path)
                raise
            self.end = Place(self.end.number + 1, 0)
        os.close(old)
        _sync_folder(self.path)

    def rotated(self) -> list[tuple[int, Path]]:
        """The rotated files with their numbers, from the oldest to the latest."""
        return [(number, path) for number, path in rotated_files(self.path) if number < self.end.number]

    def read_from(self, place: Place) -> BinaryIO | None:
        """Open the file of a place, there. None if there is no such file any more. May be called in any thread."""
        with self._moving:
            whole = place.number == self.end.number
            path = self.path if whole else self.path.with_name(f"{self.path.name}.{place.number}")
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
        file.seek(place.offset)
        return file

    def numbers(self) -> list[int]:
        """The numbers of all files that there are, from the oldest on. May be called in any thread."""
        with self._moving:
            return [number for number, _ in self.rotated()] + [self.end.number]


def check_usage_log(path: Path) -> None:
    """Raise ConfigError if the log can't be written, or if another cluster writes it. Makes it if there is none."""
    UsageLog(path, patience_s=_ENDING_S).close()


def rotated_files(path: Path) -> list[tuple[int, Path]]:
    """Return the rotated files of a log with their numbers, from the oldest to the latest."""
    found = []
    for each in path.parent.glob(f"{glob_escape(path.name)}.*"):
        suffix = each.name.removeprefix(f"{path.name}.")
        if suffix.isascii() and suffix.isdigit():
            found.append((int(suffix), each))
    return sorted(found)


def glob_escape(name: str) -> str:
    """Return a pattern that only this name matches."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def open_all(path: Path) -> list[BinaryIO]:
    """Open all files of a log that may be written meanwhile, from the oldest on: each line that was there is in one of them.

    Raises ConfigError if there is no log, or if it can't be read.
    """
    try:
        with contextlib.suppress(FileNotFoundError):  # it is being rotated, or there are only old ones
            return _opened_with_rotated(path, path.open("rb"))
        return _opened_with_rotated(path, None)
    except OSError as error:
        raise ConfigError(f"{path}: the usage log can't be read: {error.strerror}", param=PARAM) from None


def _opened_with_rotated(path: Path, latest: BinaryIO | None) -> list[BinaryIO]:
    """The rotated files, and `latest` among them, which may have been rotated since it was opened."""
    files: list[BinaryIO] = []
    known = None if latest is None else os.fstat(latest.fileno()).st_ino
    for _, each in rotated_files(path):
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            file = each.open("rb")
            if os.fstat(file.fileno()).st_ino == known:
                file.close()
                break  # what was written after it was not there when this began
            files.append(file)
    files += [] if latest is None else [latest]
    if not files:
        raise FileNotFoundError(2, os.strerror(2))
    return files


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file from where it is, each with its end, up to the last one that is whole."""
    inside = False
    while line := file.readline(_LONGEST_LINE):
        whole = line.endswith(b"\n")
        if whole and not inside:
            yield line
        elif whole:
            yield b"\n"  # the end of a line that is too long to be one of ours
        inside = not whole


def _locked(path: Path, patience_s: float) -> int:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, LOG_MODE)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise ConfigError(
                    f"{path}: another cluster writes this usage log; `tandem stop` ends one that was left", param=PARAM
                ) from None
            time.sleep(_AGAIN_S)  # the kernel tells nobody when a lock is free
        else:
            return lock


def _opened(path: Path) -> tuple[int, int]:
    """A file of the log, made if there is none, and the offset behind its last end of a line.

    Raises OSError, and changes nothing, if it is not a file of a usage log.
    """
    file = open_log(path, os.O_RDWR)
    try:
        size, left = _end_of_lines(file)
        if not _cut_line(left):
            problem = "its end is no beginning of a line of a usage log, so it may be another file; nothing is cut off"
            raise OSError(errno.EINVAL, problem)
        os.fchmod(file, LOG_MODE)
        _sync_folder(path)
    except OSError:
        os.close(file)
        raise
    return file, size


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _end_of_lines(file: int) -> tuple[int, bytes]:
    """The offset behind the last end of a line, and what lies there, without zeros around it: more than a line's bytes of it
    are not looked for.
    """
    end, left = os.fstat(file).st_size, b""
    while end and len(left) <= _LONGEST_LINE:
        begin = max(0, end - _BLOCK)
        block = os.pread(file, end - begin, begin)
        found = block.rfind(b"\n")
        left = (block[found + 1 :] + left).strip(b"\0")
        if found >= 0:
            return begin + found + 1, left
        end = begin
    return end, left


def _cut_line(left: bytes) -> bool:
    """Whether a crash within a write can have left this at the end of a file, where it has also left zeros."""
    return len(left) <= _LONGEST_LINE and (left.startswith(_BEGIN) or _BEGIN.startswith(left))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: the usage log can't be written: {error.strerror}", param=PARAM) from None
