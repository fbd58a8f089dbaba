"""Whether a folder is safe from other users of the machine: what HAProxy reads its configuration from has to be.

Imports the standard library only, since `tandem-haproxy` runs at every HAProxy reload.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def close_folder(folder: Path) -> str | None:
    """Let nobody else into a folder, and say which other user could still put another one in its place.

    None means that nobody but root could. /tmp and others with the sticky bit are safe places, since nobody may rename there
    what is another user's.
    """
    whole = folder.resolve()
    if whole.stat().st_uid != os.geteuid():
        return f"{whole} belongs to another user"
    whole.chmod(0o700)
    for place in whole.parents:
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            return f"other users may write in {place}"
    return None
