"""Opens the files that logs are written to, which operators name: never a device, a pipe, or a link to another file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LOG_MODE = 0o600


def open_log(path: Path, flags: int) -> int:
    """Open a log's file, made for its owner alone if there is none, and return its descriptor. Raises OSError if it is no file.

    `flags` say how it is read and written (`os.O_RDWR`, `os.O_APPEND`). The mode of a file that is there stays as it is.
    """
    # A pipe that nobody reads would block, without O_NONBLOCK. For files it changes nothing.
    file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, LOG_MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file")
    return file
