"""Processes that tests start, and find again by a mark in the environment that all below them inherits."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

TANDEM = str(Path(sys.executable).with_name("tandem"))


def marked_processes(mark: str) -> dict[int, str]:
    """What runs with this in its environment, and what descends from it: process ids to command lines.

    A process that gives itself another title, as Ray's do, writes over the environment that others see.
    """
    commands, children, found = {}, defaultdict[int, list[int]](list), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            try:
                commands[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                # The name, which comes before in parentheses, may hold anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                marked = mark.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            children[parent].append(pid)
            if marked:
                found.append(pid)
    for pid in found:
        found += [child for child in children[pid] if child not in found]
    return {pid: commands[pid] for pid in found if commands.get(pid)}
