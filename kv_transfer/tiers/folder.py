"""The folder that the workers of a node share: closed to other users, and locked where only one may work at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.errors import ConfigError

_POLL_S = 0.005


def open_folder(folder: Path) -> None:
    """Make a folder that is ours alone, or see that it is.

    Raises ConfigError; FileNotFoundError if somebody removes the folder meanwhile.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"{folder}: can't be made: {error.strerror}") from None
    is_usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder}: is a link or a file, not a folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{folder}: belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{folder}: other users may enter it; `chmod 700` closes it")
    if not is_usable:
        raise ConfigError(f"{folder}: can't be written")


@contextmanager
def locked(path: Path, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Hold a lock against other processes, and other threads of this one. The kernel frees it when its holder dies.

    Raises TimeoutError if somebody holds it for longer than `timeout_s`, or once `stopped` is true; OSError if the file can't
    be made.
    """
    deadline = time.monotonic() + timeout_s
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while not _take(fd):
            if time.monotonic() > deadline or stopped():
                raise TimeoutError(f"{path}: another process holds it")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
