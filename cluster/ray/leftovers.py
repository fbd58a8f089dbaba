"""Folders of a run in /tmp, and what becomes of those whose run was killed.

    claim ──► `owner` in the folder, locked by this process ──► the process ends, however it does: the lock is free
                                                                        └─► the next run removes the folder

A run that ends by itself removes its folders. The kernel keeps the lock, so a process id that is used again misleads nobody. A
folder without the file is left alone: nobody knows whose it is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

TEMPORARY = Path("/tmp")
"""Where the folders of runs are, whatever TMPDIR and RAY_TMPDIR say: the path of a Unix socket has about 100 bytes."""
SCRATCH_PREFIX = "tandem-"
RAY_SESSIONS = TEMPORARY / "ray"
KEPT_SESSIONS = 8
"""Number of former Ray sessions of ours that stay, for their logs."""
_OWNER = "owner"


def claim(folder: Path) -> IO[str]:
    """Mark a folder as one of a run that lives. Close the file that is returned to give it up."""
    fresh = folder / f"{_OWNER}.{os.getpid()}"
    lock = fresh.open("w")  # not inherited by other programs
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    fresh.replace(folder / _OWNER)  # locked before anybody sees it
    return lock


def is_left(folder: Path) -> bool:
    """Return whether a run of this user's has claimed this folder and ended since."""
    try:
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.geteuid():
            return False
        with (folder / _OWNER).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # no such file, or somebody holds the lock
        return False
    return True


def remove_leftovers(temporary: Path = TEMPORARY, sessions: Path = RAY_SESSIONS) -> list[Path]:
    """Remove the folders of runs that were killed, and all but the latest Ray sessions of runs that ended. Return them.

    What can't be removed stays: the next run tries again.
    """
    left = [folder for folder in temporary.glob(f"{SCRATCH_PREFIX}*") if is_left(folder)]
    ended = [folder for folder in sessions.glob("session_*") if is_left(folder)]
    ended.sort(key=lambda folder: folder.name, reverse=True)  # the name begins with the time of its start
    removed = [*left, *ended[KEPT_SESSIONS:]]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    if removed:
        log.info("removed %d folders of former runs", len(removed))
    return removed
