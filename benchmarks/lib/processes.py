"""CPU time and memory of a process and everything it started, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> dict[int, str]:
    """Return the process and its descendants, as command names by pid."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = _stat(folder / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(folder.name)
        names[pid], parents[pid] = name, int(rest[1])
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return {pid: names[pid] for pid in found if pid in names}


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process in seconds; 0 if it is gone."""
    try:
        _, rest = _stat(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(rest[11]) + int(rest[12])) * _TICK_S


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the user and system time of each thread of a process in seconds."""
    found: dict[int, float] = {}
    for folder in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            _, rest = _stat(folder / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(folder.name)] = (int(rest[11]) + int(rest[12])) * _TICK_S
    return found


def pss_bytes(pid: int) -> int:
    """Return the memory that a process has for itself, and its share of what it has with others; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _stat(path: Path) -> tuple[str, list[str]]:
    """Command name, and the fields after it (state first)."""
    text = path.read_text()
    end = text.rindex(")")
    return text[text.index("(") + 1 : end], text[end + 2 :].split()
