"""The GCS is killed on a head node with Redis and `tandem keep-gcs`: serving goes on, and then the cluster is whole again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.streams import Answered, Request
from cluster.ray.session import free_port, local_environment
from tests.integration.disturbed import begun, disturbed, until
from tests.integration.local_processes import TANDEM, kill_marked, marked_processes, ray_head_command

REDIS = shutil.which("redis-server")
START_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")]


@dataclass
class Head:
    """A Ray head node on this machine, its Redis, and who starts its GCS again."""

    address: str
    environment: dict[str, str]
    mark: str
    guard: subprocess.Popen[bytes]

    def gcs(self) -> int | None:
        return next((pid for pid, command in marked_processes(self.mark).items() if "/gcs_server " in command), None)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    assert REDIS is not None
    port, redis_port, mark = free_port(), free_port(), uuid.uuid4().hex
    # In /tmp: a Unix socket's path has about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        own = local_environment(Path(scratch)) | {
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
            "RAY_external_storage_namespace": mark,
            "TANDEM_TEST_MARK": mark,
        }
        environment = os.environ | own
        redis_command = [REDIS, "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", scratch]
        ray_command = ray_head_command(port, scratch)
        guard_command = [TANDEM, "keep-gcs", "--port", str(port)]
        try:
            with (
                (tmp_path / "ray.log").open("wb") as log,
                subprocess.Popen(redis_command, env=environment, stdout=log, stderr=log) as redis,
            ):
                subprocess.run(ray_command, env=environment, stdout=log, stderr=log, timeout=START_S, check=True)
                with subprocess.Popen(guard_command, env=environment, stdout=log, stderr=log) as guard:
                    yield Head(f"127.0.0.1:{port}", own, mark, guard)
                    raylet = next(pid for pid, command in marked_processes(mark).items() if "/raylet/raylet " in command)
                    os.kill(raylet, signal.SIGKILL)
                    assert guard.wait(10) == 0, "it ends with its node"
                redis.kill()
        finally:
            kill_marked(mark)


def lives(cluster: Any) -> dict[str, tuple[int, int]]:
    return {worker["worker_id"]: (worker["epoch"], worker["pid"]) for worker in cluster.workers()}


@pytest.mark.timeout(300)
def test_serving_goes_on_without_the_gcs_and_the_cluster_is_whole_with_the_next(head: Head, serve: Callable[..., Any]) -> None:
    flags = ("--address", head.address, "--decode", "2")
    cluster = serve(*flags, environment=head.environment)
    cluster.wait_ready()
    before = lives(cluster)
    gcs = head.gcs()
    assert gcs is not None

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        head.guard.send_signal(signal.SIGSTOP)
        os.kill(gcs, signal.SIGKILL)
        (late,) = [await Answered(Request("greedy", 9, 10)).run(client)]
        assert (late.failure, late.complete) == (None, True), "new requests get through"
        os.kill(before["worker-2"][1], signal.SIGKILL)
        await until(lambda: all(answer.complete or answer.failure for answer in answers), 60)
        assert head.gcs() is None
        head.guard.send_signal(signal.SIGCONT)

    requests = [Request(kind, number, 80) for number in range(2) for kind in ("greedy", "seeded")]
    try:
        asyncio.run(disturbed(cluster, requests, disturb))
        cluster.until(lambda: lives(cluster)["worker-2"][0] == before["worker-2"][0] + 1, 40)
        cluster.until(lambda: cluster.settled(1, 2), 60)
        assert head.gcs() not in (None, gcs)
        assert lives(cluster) == before | {"worker-2": lives(cluster)["worker-2"]}, "nobody else was restarted"
        assert cluster.scale(decode=3).status_code == 200
        cluster.until(lambda: cluster.settled(1, 3), 60)
        (controller,) = [pid for pid, command in marked_processes(head.mark).items() if command.startswith("ray::Controller")]
        os.kill(controller, signal.SIGKILL)
        os.kill(cluster.worker("worker-1")["pid"], signal.SIGKILL)
        cluster.until(lambda: lives(cluster)["worker-1"][0] == before["worker-1"][0] + 1, 40)
        cluster.until(lambda: cluster.settled(1, 3), 60)
        assert cluster.leaks() == []
    finally:
        cluster.end()
