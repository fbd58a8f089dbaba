"""A node that is short of something: 64 MiB of /dev/shm, a full disk, memory. Streams go on, and say what they would have.

/dev/shm and disk are real ones, in a mount namespace of the cluster's own; they are filled through /proc/PID/root. Memory is
taken from one worker: by a limit of its address space, so that its allocations fail, or by a control group, in which the
kernel kills it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.streams import KINDS, Answered, Request
from tests.integration.disturbed import begun, disturbed, until
from tests.integration.local_processes import TANDEM

pytestmark = pytest.mark.slow

MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
SHM_MIB, TMP_MIB = 64, 400
MIB = 1 << 20
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
REQUESTS = [Request(kind, number, 60) for number in range(2) for kind in ("greedy", "seeded", "choices", "schema")]


def own_mounts_refused() -> str | None:
    """Why no process here may have mounts of its own; None if it may."""
    command = [*MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


NO_MOUNTS = own_mounts_refused()
own_mounts = pytest.mark.skipif(NO_MOUNTS is not None, reason=f"no mounts of its own: {NO_MOUNTS}")


@pytest.fixture
def small_tandem(tmp_path: Path) -> str:
    """A `tandem` that has little in /dev/shm and /tmp, and its own files of models."""
    mounts = f"mount -t tmpfs -o size={SHM_MIB}m tmpfs /dev/shm && mount -t tmpfs -o size={TMP_MIB}m,mode=1777 tmpfs /tmp"
    script = tmp_path / "small-tandem"
    script.write_text(f'#!/bin/sh\nexec {" ".join(MOUNTS)} sh -c \'{mounts} && exec {TANDEM} "$@"\' tandem "$@"\n')
    script.chmod(0o755)
    return str(script)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No byte is left on this file system."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (MIB, 4096, 1):
                with suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), (folder / "more").open("wb", buffering=0) as file:
            file.write(b"x" * 4096)
        yield
    finally:
        for path in (filler, folder / "more"):
            path.unlink(missing_ok=True)


def kill_a_decode_worker(cluster: Any) -> int:
    victim = max((w for w in cluster.workers() if w["role"] == "decode"), key=lambda worker: int(worker["running"] or 0))
    os.kill(victim["pid"], signal.SIGKILL)
    return int(victim["pid"])


@own_mounts
def test_a_container_with_64_mib_of_shared_memory_serves(small_tandem: str, serve: Callable[..., Any]) -> None:
    """Pools lie in memfds, which are not in /dev/shm, and Ray's object store goes to /tmp."""
    cluster = serve("--decode", "2", command=small_tandem)
    cluster.wait_ready()
    cluster.until(lambda: cluster.settled(1, 2), 90)
    shm = Path(f"/proc/{cluster.workers()[0]['pid']}/root/dev/shm")
    assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == SHM_MIB * MIB

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        kill_a_decode_worker(cluster)

    with filled(shm):
        asyncio.run(disturbed(cluster, REQUESTS, disturb))
        cluster.until(lambda: cluster.settled(1, 2), 90)
    cluster.until(cluster.clean, 30)


@own_mounts
def test_a_memory_tier_that_does_not_fit_is_refused_with_what_to_do(small_tandem: str, serve: Callable[..., Any]) -> None:
    cluster = serve("--kv-offloading-size", "1", command=small_tandem)
    assert cluster.process.wait(timeout=120) == 2, cluster.said()
    line = cluster.said().splitlines()[-1]
    assert "/dev/shm" in line, line
    assert "--shm-size" in line, line


@own_mounts
@pytest.mark.timeout(400)
def test_streams_go_on_while_disk_and_tiers_are_full(small_tandem: str, serve: Callable[..., Any]) -> None:
    """/tmp, where Ray's and our logs, HAProxy's files and the counts are, and both tiers: not a byte can be written."""
    flags = ("--kv-offloading-size", "0.05", "--kv-offloading-dir", "/tmp/kv", "--kv-offloading-disk-size", "0.05")
    cluster = serve("--decode", "2", *flags, command=small_tandem)
    cluster.wait_ready()
    cluster.until(lambda: cluster.settled(1, 2), 90)
    root = Path(f"/proc/{cluster.workers()[0]['pid']}/root")
    before = {worker["worker_id"]: worker["pid"] for worker in cluster.workers()}

    async def nothing(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(lambda: all(answer.complete or answer.failure for answer in answers))

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        kill_a_decode_worker(cluster)

    with filled(root / "tmp"), filled(root / "dev" / "shm"):
        asyncio.run(disturbed(cluster, REQUESTS, nothing))
        assert {worker["worker_id"]: worker["pid"] for worker in cluster.workers()} == before, "nobody ended"
        asyncio.run(disturbed(cluster, REQUESTS, disturb))
        assert cluster.leaks() == []
    cluster.until(lambda: cluster.settled(1, 2), 150)
    asyncio.run(disturbed(cluster, REQUESTS, nothing))
    cluster.until(cluster.clean, 30)


@pytest.fixture(scope="module")
def two_decodes(serve: Callable[..., Any]) -> Any:
    cluster = serve("--decode", "2")
    cluster.wait_ready()
    cluster.until(lambda: cluster.settled(1, 2), 90)
    return cluster


def take_address_space(pid: int) -> None:
    """Not a page more than the process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def take_memory(pid: int) -> None:
    """Hardly a page more: what it has so far counts for the group that it came from."""
    group = MEMORY_GROUPS / f"tandem-test-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(MIB))
    (group / "cgroup.procs").write_text(str(pid))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_streams_outlive_a_worker_that_gets_no_memory(two_decodes: Any) -> None:
    """Further requests, larger than those before, make it ask for more. It ends, and its streams go on elsewhere."""
    two_decodes.until(lambda: two_decodes.settled(1, 2), 90)
    victim = next(worker for worker in two_decodes.workers() if worker["role"] == "decode")
    requests = [Request(kind, number, 120) for number in range(3) for kind in KINDS]

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        take = take_memory if os.access(MEMORY_GROUPS, os.W_OK) else take_address_space
        take(victim["pid"])
        more = [Answered(Request("greedy", number, 400)) for number in range(100, 108)]
        await asyncio.gather(*(answer.run(client) for answer in more))
        assert [answer.failure for answer in more] == [None] * len(more)

    try:
        asyncio.run(disturbed(two_decodes, requests, disturb))
        two_decodes.until(lambda: two_decodes.settled(1, 2), 90)
        after = two_decodes.worker(victim["worker_id"])
        assert after["epoch"] > victim["epoch"], "it got no memory, and ended"
        two_decodes.until(two_decodes.clean, 30)
    finally:
        group = MEMORY_GROUPS / f"tandem-test-{os.getpid()}"
        if group.exists():
            two_decodes.until(lambda: not (group / "cgroup.procs").read_text(), 30)
            group.rmdir()
