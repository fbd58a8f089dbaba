"""The whole cluster on two Ray nodes: prefill on one, decode on the other, router and controller on the head.

The nodes are Ray's own test cluster on this machine, in a process of its own (two_ray_nodes.py); `tandem serve` joins it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

CONFIGURATION = """
dtype: float32
disaggregation: always
prefill: {resources: {tandem_prefill: 1}}
decode: {resources: {tandem_decode: 1}}
"""


@dataclass
class Nodes:
    """Two Ray nodes; `ray` is what two_ray_nodes.py says about them at its start."""

    process: subprocess.Popen[str]
    ray: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        return {**self.ray["environment"], "RAY_ADDRESS": self.ray["address"]}

    def homes(self) -> dict[str, str]:
        """Nodes of Tandem's placement groups."""
        assert self.process.stdin is not None
        self.process.stdin.write("where\n")
        self.process.stdin.flush()
        homes: dict[str, str] = self.read(self.process)
        return homes

    @staticmethod
    def read(process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        return json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    script = str(Path(__file__).with_name("two_ray_nodes.py"))
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nodes(process, Nodes.read(process))
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)


@pytest.fixture
def joined(nodes: Nodes, tmp_path: Path, serve: Callable[..., Any]) -> Any:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIGURATION)
    served = serve("--config", str(path), environment=nodes.environment)
    served.wait_ready()
    return served


def test_prefill_and_decode_on_different_nodes(nodes: Nodes, joined: Any) -> None:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    assert "Paris" in httpx.post(f"{joined.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert nodes.homes() == {"tandem-worker-0": nodes.ray["prefill_node"], "tandem-worker-1": nodes.ray["decode_node"]}
    assert joined.end() < 60
    assert joined.process.returncode == 0, joined.said()
    assert nodes.homes() == {}, "workers and placement groups are gone, Ray is not"


def test_a_command_whose_cluster_is_stopped_by_another_says_so(nodes: Nodes, joined: Any) -> None:
    stopped = joined.command("stop", environment=nodes.environment)
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped.stderr
    assert joined.process.wait(timeout=60) == 0, joined.said()
    said = joined.said().splitlines()
    assert "stopping: another command asked for it; no new requests are let in" in said
    assert said[-1] == "stopped"
    assert nodes.homes() == {}


def test_stop_removes_what_a_killed_command_left(nodes: Nodes, joined: Any) -> None:
    joined.end(signal.SIGKILL)
    assert set(nodes.homes()) == {"tandem-worker-0", "tandem-worker-1"}, "detached: they outlive their command"
    assert joined.worker("worker-1")["state"] == "ready"
    stopped = joined.command("stop", environment=nodes.environment)
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped.stderr
    assert nodes.homes() == {}
