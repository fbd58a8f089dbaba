"""Who uses a folder of blocks: any number of workers with blocks of one description. The kernel frees a lock with its process.

    occupy ──► `in_use` in the folder, locked with others ──► leave: the lock is free
                  └── others hold it with another description: refused

The memory tier lies in memory that nobody else gives back. So the last worker to leave removes its folder. Workers that are
killed leave it: the end of their cluster removes it then, or the next worker with a memory tier.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from hashlib import blake2b
from pathlib import Path

from kv_transfer.tiers.folder import open_folder
from protocol.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_IN_USE = "in_use"
_OPENING_S, _DYING_S, _LOOK_S = 5.0, 2.0, 0.1


class Occupied:
    """A folder that this worker uses, until `leave`."""

    def __init__(self, folder: Path, described: bytes, *, keep: bool) -> None:
        """`keep`: the blocks stay when the last worker has left.

        Raises ConfigError if the folder can't be used, or if others use it now for blocks of another description.
        """
        self._folder = folder
        self._keep = keep
        self._fd = -1
        until = time.monotonic() + _OPENING_S
        while not self._opened(described):
            if time.monotonic() > until:
                raise ConfigError(f"{folder}: others make and remove it again and again", param="kv_offloading")
            time.sleep(_LOOK_S / 10)
        if os.pread(self._fd, len(described) + 1, 0) != described:
            os.close(self._fd)
            raise ConfigError(
                f"{folder}: is in use for the KV of another model, format, block size, arithmetic or number of ranks",
                param="kv_offloading",
            )

    def leave(self) -> None:
        """Use it no longer. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if not self._keep and _lock(fd, fcntl.LOCK_EX):
            _remove(self._folder)
        os.close(fd)

    def _opened(self, described: bytes) -> bool:
        """Whether the folder was locked with others, and is still there: the last one to leave may remove it meanwhile."""
        try:
            open_folder(self._folder)
            self._fd = os.open(self._folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable(error) from None
        if _lock(self._fd, fcntl.LOCK_EX):
            try:
                os.truncate(self._fd, 0)
                os.pwrite(self._fd, described, 0)
            except OSError as error:
                os.close(self._fd)
                raise self._unusable(error) from None
        if _lock(self._fd, fcntl.LOCK_SH) and self._is_there():
            return True
        os.close(self._fd)
        return False

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._folder}: can't be written: {error.strerror}", param="kv_offloading")

    def _is_there(self) -> bool:
        try:
            there = os.stat(self._folder / _IN_USE)
        except FileNotFoundError:
            return False
        ours = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def memory_folder(secret: bytes) -> Path:
    """Where the memory tier of the cluster with this secret lies, on each of its nodes."""
    return SHARED_MEMORY / f"{_prefix()}{blake2b(secret, digest_size=8, person=b'kv-folder').hexdigest()}"


def remove_left() -> list[Path]:
    """Remove the folders of memory tiers that nobody uses any more. Returns them."""
    removed = []
    for folder in _folders():
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
        try:
            if _lock(fd, fcntl.LOCK_EX):
                _remove(folder)
                removed.append(folder)
        finally:
            os.close(fd)
    return removed


def remove_left_in_time() -> None:
    """The same, for the few seconds in which processes that were killed just now may still hold theirs."""
    until = time.monotonic() + _DYING_S
    remove_left()
    while _folders() and time.monotonic() < until:
        time.sleep(_LOOK_S)
        remove_left()


def _remove(folder: Path) -> None:
    """The file that tells whether somebody uses the folder goes last: a removal that is cut off can be completed."""
    with contextlib.suppress(OSError):
        with os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _IN_USE:
                os.unlink(entry)
    shutil.rmtree(folder, ignore_errors=True)


def _folders() -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{_prefix()}*"))


def _prefix() -> str:
    return f"tandem-kv-{os.geteuid()}-"


def _lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
