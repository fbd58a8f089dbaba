"""What this machine has, for processes that don't load torch: its memory, and its processor's features."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CPU_INFO = Path("/proc/cpuinfo")


def memory_bytes() -> int:
    """Return the bytes of physical memory, or of the control group's limit where that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP_LIMITS:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


@cache
def processor_features() -> frozenset[str]:
    """Return the processor's features, as Linux names them; none on another system."""
    if platform.system() != "Linux":
        return frozenset()
    for line in _CPU_INFO.read_text().splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(features.split())
    return frozenset()
