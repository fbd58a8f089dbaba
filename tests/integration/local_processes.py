"""Processes that tests start, and find again by a mark in the environment that all below them inherits."""

from __future__ import annotations

import sys
from pathlib import Path

TANDEM = str(Path(sys.executable).with_name("tandem"))


def marked_processes(mark: str) -> dict[int, str]:
    """What runs with this in its environment: process ids to command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # it ended meanwhile
    return {pid: command for pid, command in found.items() if command}
