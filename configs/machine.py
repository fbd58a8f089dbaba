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
    return frozenset(_of_processor("flags", "Features").split())


def processor_maker() -> str:
    """Return `intel` or `amd`, or what else Linux calls the maker of an x86 processor; nothing where it says none."""
    vendor = _of_processor("vendor_id")
    return {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(vendor, vendor)


def _of_processor(*names: str) -> str:
    """What Linux says of the first processor under one of these names."""
    if platform.system() != "Linux":
        return ""
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
