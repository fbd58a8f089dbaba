"""Cores and quotas, read from made-up trees of Linux's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.machine import cpu_quota, memory_bytes, num_cores, num_gpus, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def siblings(*groups: str) -> dict[str, str]:
    """Topology of logical processors 0, 1, 2 and so on, each with the list that it is in."""
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": group for cpu, group in enumerate(groups)}


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"))
    assert num_cores(range(8), root) == 4
    assert num_cores({0, 4}, root) == 1, "a process that may use these two alone"
    assert num_cores({0, 1, 5}, root) == 2


def test_a_processor_without_topology_is_a_core(tmp_path: Path) -> None:
    assert num_cores(range(3), tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (
            {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 1"},
            3.0,
        ),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/cpu.max": "2 1"}, 2.0),
        ({"proc/self/cgroup": "0::/not/seen/in/here", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        ({"proc/self/cgroup": "0::/../outside", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/box\n1:memory:/box",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "8192"}, 8192),
        ({"sys/fs/cgroup/memory.max": "8192"}, 8192),
        (
            {
                "proc/self/cgroup": "0::/system.slice/tandem.service",
                "sys/fs/cgroup/system.slice/tandem.service/memory.max": "8192",
                "sys/fs/cgroup/system.slice/memory.max": "max",
            },
            8192,
        ),
        (
            {
                "proc/self/cgroup": "0::/job_1/step_0",
                "sys/fs/cgroup/job_1/step_0/memory.max": "8192",
                "sys/fs/cgroup/job_1/memory.max": "4096",
            },
            4096,
        ),
        ({"proc/self/cgroup": "0::/../outside", "sys/fs/cgroup/memory.max": "8192"}, 8192),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/\n1:memory:/slurm/job_1",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "8192",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            8192,
        ),
        ({"proc/self/cgroup": "1:memory:/docker/not/seen", "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192"}, 8192),
    ],
)
def test_the_tightest_limit_of_memory_counts(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_bytes(write(tmp_path, files)) == (limit or physical)


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


DRIVER = {"proc/driver/nvidia/gpus/0000:17:00.0/information": "", "proc/driver/nvidia/gpus/0000:65:00.0/information": ""}
DEVICES = {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/null": ""}


@pytest.mark.parametrize("files", [DRIVER, DEVICES, DRIVER | DEVICES])
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 2),
        ("0,1", 2),
        ("1", 1),
        ("0, 1, 2, 3", 2),
        ("GPU-8a3d0c6e", 1),
        ("MIG-0f2e", 1),
        ("0,-1,1", 1),
        ("-1", 0),
        ("", 0),
        ("NoDevFiles", 0),
    ],
)
def test_gpus_are_those_of_the_driver_that_are_visible(
    tmp_path: Path, files: dict[str, str], visible: str | None, expected: int
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(write(tmp_path, files), environment) == expected


def test_a_machine_without_nvidias_driver_has_no_gpus(tmp_path: Path) -> None:
    assert num_gpus(write(tmp_path, {"dev/null": "", "dev/nvidiactl": ""}), {"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_a_container_has_the_gpus_whose_files_it_has(tmp_path: Path) -> None:
    """The driver tells of all of the host's."""
    files = {f"proc/driver/nvidia/gpus/0000:{number:02}:00.0/information": "" for number in range(8)}
    assert num_gpus(write(tmp_path, files | {"dev/nvidia3": "", "dev/nvidia5": "", "dev/nvidiactl": ""}), {}) == 2
