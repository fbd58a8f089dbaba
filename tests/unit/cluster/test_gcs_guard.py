"""Which processes `tandem keep-gcs` looks after. That it starts them again, tests/integration/test_head_node.py shows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cluster.ray import gcs_guard
from cluster.ray.gcs_guard import Process, gcs_and_raylet, guard_gcs
from protocol.errors import ConfigError


def gcs(pid: int, port: int, node_id: str) -> Process:
    arguments = ("/ray/gcs/gcs_server", f"--gcs_server_port={port}", f"--node-id={node_id}", "--redis_address=127.0.0.1")
    return Process(pid, 1, arguments, {})


def raylet(pid: int, node_id: str) -> Process:
    return Process(pid, 1, ("/ray/raylet/raylet", f"--node_id={node_id}", "--node_ip_address=127.0.0.1"), {})


SHELL = Process(9, 1, ("bash", "-c", "gcs_server --gcs_server_port=6379"), {})


@pytest.mark.parametrize(("port", "pids"), [(6379, (2, 5)), (6380, (4, 3))])
def test_the_gcs_of_a_port_and_its_own_nodes_raylet(port: int, pids: tuple[int, int]) -> None:
    found = gcs_and_raylet([SHELL, gcs(2, 6379, "a"), raylet(3, "b"), gcs(4, 6380, "b"), raylet(5, "a")], port)
    assert tuple(process.pid for process in found if process is not None) == pids


def test_what_is_not_there_is_not_found() -> None:
    assert gcs_and_raylet([SHELL, raylet(3, "b")], 6379) == (None, None)
    alone = gcs(2, 6379, "a")
    assert gcs_and_raylet([alone, raylet(3, "b")], 6379) == (alone, None)
    assert alone.value_of("--redis_address") == "127.0.0.1"
    assert alone.value_of("--redis") is None


@pytest.mark.parametrize("during_the_pause", [True, False])
def test_no_gcs_is_started_on_a_node_that_was_stopped(monkeypatch: pytest.MonkeyPatch, during_the_pause: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as gcs_process, subprocess.Popen(["sleep", "600"]) as raylet_process:

        def stop_node(*_: Any) -> None:
            raylet_process.kill()
            raylet_process.wait()

        gcs_process.kill()
        gcs_process.wait()
        if during_the_pause:
            monkeypatch.setattr(gcs_guard.log, "warning", stop_node)
        else:
            stop_node()
        both = gcs(gcs_process.pid, 6379, "a"), raylet(raylet_process.pid, "a")
        monkeypatch.setattr(gcs_guard, "_both", lambda port: both)

        def start(*arguments: Any, **options: Any) -> None:
            stop_node()
            raise AssertionError("a GCS was started")

        monkeypatch.setattr(subprocess, "Popen", start)
        guard_gcs(6379)


def test_a_node_that_ends_with_its_gcs_is_refused() -> None:
    """`ray start --block` looks at its processes once a second, and kills all of them when one has died."""
    port, wait = 99_999, "import sys; print('begun', flush=True); sys.stdin.read()"
    gcs_command = ["gcs_server", "-c", wait, f"--gcs_server_port={port}", "--redis_address=127.0.0.1"]
    start = f"import subprocess, sys; subprocess.run({gcs_command!r}, executable=sys.executable)"
    command = [sys.executable, "-c", start, "start", "--head", "--block"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as blocking:
        try:
            assert blocking.stdout is not None
            assert blocking.stdout.readline() == b"begun\n"
            with pytest.raises(ConfigError, match=f"the GCS at port {port} ends with it: start it without `ray start --block`"):
                guard_gcs(port)
        finally:
            blocking.communicate()  # which closes what both wait for
