"""Replaces a file as a whole: who reads it finds the former one or the new one, and never half of one."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Put data into a file as a whole, readable by its owner alone. With `sync` it is on disk when this returns.

    Raises OSError if that fails; then the former file is still there.
    """
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "wb", opener=_private) as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
