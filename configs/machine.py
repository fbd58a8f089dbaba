"""What this machine has, for processes that don't load torch: its memory, its cores, its GPUs, its processor's features.

Functions that read Linux's files take the folder that they lie in, `/` on a real machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

_ROOT = Path("/")
_CPU_INFO = Path("/proc/cpuinfo")


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of physical memory, or of the tightest limit of this process's control groups where that is lower.

    The groups are those of `cpu_quota`.
    """
    limits = (_text(group / name) for group in _own_groups(root, "memory") for name in ("memory.max", "memory.limit_in_bytes"))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit) for limit in limits if limit and limit.isdigit())])


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy at a time, at least 1.

    Hyperthreads of one core count once: two threads that multiply share its arithmetic. A quota of the control group counts
    rounded down, since a thread that is stopped in the middle of an operator holds up all others.
    """
    if platform.system() != "Linux":
        return os.cpu_count() or 1
    quota = cpu_quota()
    cores = num_cores(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def num_cores(cpus: Collection[int], root: Path = _ROOT) -> int:
    """Return the number of cores that these logical processors of Linux belong to. One without known siblings is a core."""
    cores = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(_text(siblings) or str(cpu))
    return len(cores)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return how many processors' time this process may use, by its control groups and those around them; None is no limit.

    Both versions of control groups are read. In a container the path that Linux gives for a process may lie outside of what is
    visible; then the groups above it are found.
    """
    limits = [limit for group in _own_groups(root, "cpu") if (limit := _limit_of(group)) is not None]
    return min(limits, default=None)


def num_gpus(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of NVIDIA GPUs that processes started from here may use; None without NVIDIA's driver.

    Goes by the driver's files and CUDA_VISIBLE_DEVICES, and asks no driver, which takes a tenth of a second.
    """
    told, files = (root / "proc/driver/nvidia/gpus").glob("*"), (root / "dev").glob("nvidia[0-9]*")
    # A container may have some of the GPUs that the driver tells of.
    devices = min(filter(None, (len(list(told)), len(list(files)))), default=0)
    if not devices:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    # CUDA sees the devices before the first that is none: -1, NoDevFiles, or nothing.
    named = list(takewhile(_names_gpu, (name.strip() for name in visible.split(","))))
    return min(devices, len(named))


@cache
def processor_features() -> frozenset[str]:
    """Return the processor's features, as Linux names them; none on another system."""
    return frozenset(_of_processor("flags", "Features").split())


def processor_maker() -> str:
    """Return `intel` or `amd`, or what else Linux calls the maker of an x86 processor; nothing where it says none."""
    vendor = _of_processor("vendor_id")
    return {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(vendor, vendor)


def processor_name() -> str:
    """Return the processor's model with what tells models of one name apart: family, model number and stepping."""
    numbers = (_of_processor(name) for name in ("cpu family", "model", "stepping"))
    return " ".join(filter(None, (_of_processor("model name") or platform.processor() or platform.machine(), *numbers)))


def _names_gpu(name: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES is a number or a UUID."""
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _of_processor(*names: str) -> str:
    """What Linux says of the first processor under one of these names."""
    if platform.system() != "Linux":
        return ""
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit `cpu` or `memory`, from its own to the outermost."""
    for line in (_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent == mount or mount in parent.parents)


def _limit_of(group: Path) -> float | None:
    """Processors' time that a control group may use; None is no limit, or no such group."""
    together = (_text(group / "cpu.max") or "").split()
    quota, period = together or (_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))
    if not quota or not period or not quota.isdigit() or not period.isdigit():
        return None  # "max" in version 2 and -1 in version 1 are no limit
    return int(quota) / int(period)


def _text(path: Path) -> str | None:
    """The file's text without the white space around it; None if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
