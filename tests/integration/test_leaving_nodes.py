"""Nodes that say that they will go, under streams: everything moves off them in time, and every stream ends as it should.

The nodes are Ray's own test cluster on this machine (ray_nodes.py): a head, and three others for two workers each. `tandem
serve` joins with one prefill and one decode worker, each the only one of its role. Where Ray places both on one node, both
leave it at once; and a node that goes has room itself, which nobody may take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_processes import TANDEM
from tests.integration.test_drain import Stream, counted, finished, run_all, tokens_for, variants

pytestmark = pytest.mark.slow

RESOURCES = '{"tandem": 2}'
CONFIGURATION = """
disaggregation: always
prefill: {resources: {tandem: 1}}
decode: {resources: {tandem: 1}}
"""
TOKENS = 400
RAY = """
import ray._private.services as services
services.resolve_ip_for_localhost = lambda host: host  # the test's nodes are on loopback, where Ray allows one alone
from ray.scripts.scripts import main
main()
"""


class Nodes:
    """The Ray cluster, through ray_nodes.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.ray: dict[str, Any] = self._read()

    def order(self, order: str) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
            return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    @property
    def environment(self) -> dict[str, str]:
        return {**self.ray["environment"], "RAY_ADDRESS": self.ray["address"]}

    def node_of(self, worker_id: str) -> str:
        found: str = self.order("where")[f"tandem-{worker_id}"]
        return found

    def leave(self, node: str, *flags: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | self.environment
        return subprocess.Popen([TANDEM, "leave", node, *flags], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    command = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), *[RESOURCES] * 3]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nodes(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def running(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Any:
    path = tmp_path_factory.mktemp("leaving") / "cluster.yaml"
    path.write_text(CONFIGURATION)
    served = serve("--config", str(path), environment=nodes.environment)
    served.wait_ready()
    return served


@pytest.fixture
def joined(nodes: Nodes, running: Any) -> Any:
    """Idle, with one worker of each role, and three nodes beside the head."""
    for _ in range(4 - len(nodes.order("up"))):
        nodes.order(f"add {RESOURCES}")
    running.until(lambda: running.settled(1, 1), 90)
    running.until(running.clean, 30)
    return running


def worker(cluster: Any, role: str) -> str:
    (found,) = (each["worker_id"] for each in cluster.workers() if each["role"] == role)
    return str(found)


def under_way(cluster: Any, streams: list[Stream]) -> None:
    for stream in streams:
        stream.start()
    cluster.until(lambda: all(len(stream.times) > 10 for stream in streams), 60)


def left(cluster: Any, nodes: Nodes, node: str, leaving: subprocess.Popen[str], timeout_s: float) -> None:
    """Until the command has said that the node is empty, Ray has ended there, and all workers are elsewhere."""
    _, said = leaving.communicate(timeout=timeout_s)
    assert leaving.returncode == 0, said
    assert said.splitlines()[-1].endswith("is empty"), said
    moved(cluster, nodes, node)


def moved(cluster: Any, nodes: Nodes, node: str) -> None:
    cluster.until(lambda: node not in nodes.order("up"), 30)
    cluster.until(lambda: cluster.settled(1, 1), 60)
    assert node not in nodes.order("where").values()


@pytest.mark.timeout(400)
def test_a_node_with_the_only_decode_worker_is_left(nodes: Nodes, joined: Any) -> None:
    max_tokens = tokens_for(joined, 40)  # twice what another worker takes to start beside these streams, on two cores
    expected = run_all(variants(joined, 8, max_tokens))
    joined.until(joined.clean, 20)
    migrated, resumed = counted(joined, "migrations_total"), counted(joined, "resumed_streams_total")
    victim = worker(joined, "decode")
    node = nodes.node_of(victim)
    streams = variants(joined, 8, max_tokens)
    under_way(joined, streams)
    begun = time.monotonic()
    leaving = nodes.leave(node[:12], "--deadline", "100")
    joined.until(lambda: any(row["leaves_at"] for row in joined.workers()), 20)
    assert "its node leaves at" in joined.command("status").stdout
    left(joined, nodes, node, leaving, 100)
    took_s = time.monotonic() - begun
    assert finished(streams) == expected
    assert counted(joined, "migrations_total") - migrated >= 8
    assert counted(joined, "resumed_streams_total") == resumed, "nothing was computed anew"
    assert counted(joined, "workers_leaving") == 0
    assert f"{victim} is gone" in joined.said()
    print(f"left after {took_s:.1f} s, longest gap {max(stream.longest_gap() for stream in streams):.3f} s")  # noqa: T201


def test_a_node_with_the_only_prefill_worker_is_left_while_requests_come(nodes: Nodes, joined: Any) -> None:
    expected = run_all(variants(joined, 8, 60))
    node = nodes.node_of(worker(joined, "prefill"))
    leaving = nodes.leave(node, "--deadline", "100", "--reason", "spot")
    rounds = 0
    while leaving.poll() is None or rounds < 2:
        assert run_all(variants(joined, 8, 60)) == expected
        rounds += 1
    left(joined, nodes, node, leaving, 10)


def test_a_deadline_that_is_too_short_has_streams_resumed_elsewhere(nodes: Nodes, joined: Any) -> None:
    max_tokens = tokens_for(joined, 10)
    expected = run_all(variants(joined, 8, max_tokens))
    resumed = counted(joined, "resumed_streams_total")
    node = nodes.node_of(worker(joined, "decode"))
    streams = variants(joined, 8, max_tokens)
    under_way(joined, streams)
    leaving = nodes.leave(node, "--deadline", "1")  # shorter than a start takes
    _, said = leaving.communicate(timeout=30)
    assert leaving.returncode in (0, 1), said
    assert finished(streams) == expected
    assert counted(joined, "resumed_streams_total") > resumed
    moved(joined, nodes, node)


def test_a_controller_that_dies_meanwhile_goes_on(nodes: Nodes, joined: Any) -> None:
    expected = run_all(variants(joined, 8, TOKENS))
    node = nodes.node_of(worker(joined, "decode"))
    streams = variants(joined, 8, TOKENS)
    under_way(joined, streams)
    leaving = nodes.leave(node, "--deadline", "100")
    joined.until(lambda: any(row["leaves_at"] for row in joined.workers()), 20)
    os.kill(nodes.order("controller"), signal.SIGKILL)
    left(joined, nodes, node, leaving, 110)
    assert finished(streams) == expected


@pytest.mark.timeout(400)
def test_a_ray_start_that_gets_sigterm_is_left_as_well(nodes: Nodes, joined: Any, tmp_path: Path) -> None:
    """As a pod that Kubernetes ends: `ray start --block` drains its node for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S."""
    expected = run_all(variants(joined, 8, TOKENS))
    known = set(nodes.order("up"))
    with ray_start(nodes, tmp_path) as pod:
        joined.until(lambda: len(nodes.order("up")) > len(known), 60)
        (own,) = set(nodes.order("up")) - known
        for other in known - {nodes.ray["head"]}:
            left(joined, nodes, other, nodes.leave(other, "--deadline", "60"), 60)
        assert set(nodes.order("where").values()) == {own}
        nodes.order(f"add {RESOURCES}")
        streams = variants(joined, 8, TOKENS)
        under_way(joined, streams)
        pod.send_signal(signal.SIGTERM)
        assert finished(streams) == expected
        pod.wait(timeout=90)
    moved(joined, nodes, own)


@contextmanager
def ray_start(nodes: Nodes, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Ray node of its own process, as in a pod."""
    flags = ["--address", nodes.ray["address"], "--node-ip-address", "127.0.0.1", "--num-cpus", "2", "--resources", RESOURCES]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | nodes.environment
    environment |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    with (scratch / "ray_start.log").open("wb") as log:
        pod = subprocess.Popen([sys.executable, "-c", RAY, "start", "--block", *flags], stdout=log, stderr=log, env=environment)
        try:
            yield pod
        finally:
            pod.kill()
            pod.wait()


def test_which_nodes_can_be_left(nodes: Nodes, joined: Any) -> None:
    for arguments, words in (
        ([nodes.ray["head"]], "that is the head node"),
        ([], "several nodes of the Ray cluster are this machine; name one by its id"),
        (["ffffffff"], "no node of the Ray cluster is 'ffffffff'; there are"),
    ):
        refused = joined.command("leave", *arguments, environment=nodes.environment)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
        assert words in refused.stderr
    assert joined.settled(1, 1)
