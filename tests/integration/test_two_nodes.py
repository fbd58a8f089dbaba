"""The whole cluster on two Ray nodes: prefill on one, decode on the other, router and controller on the head.

The nodes are Ray's own test cluster on this machine, in a process of its own (two_ray_nodes.py); `tandem serve` joins it.
"""

from __future__ import annotations

import asyncio
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

from benchmarks.lib.streams import Answered, Request
from tests.integration.disturbed import begun, disturbed, until

pytestmark = pytest.mark.slow

CONFIGURATION = """
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
        return self._ask("where")

    def replace_decode_node(self) -> None:
        """Kill the decode node, and start another one."""
        self._ask("replace")

    def _ask(self, line: str) -> dict[str, str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
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


@pytest.mark.timeout(400)
def test_streams_wait_for_another_node_when_theirs_was_killed(nodes: Nodes, joined: Any) -> None:
    """The only decode worker was on it. Ray notices in its own time, and then places the worker's next life."""
    before = joined.worker("worker-1")

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        await asyncio.to_thread(nodes.replace_decode_node)

    def placed_anew() -> bool:
        """Perhaps twice: the first start may meet a node that Ray has not given up yet."""
        after = joined.worker("worker-1")
        return bool(after["epoch"] > before["epoch"] and after["state"] == "ready")

    requests = [Request(kind, number, 200) for number in range(4) for kind in ("greedy", "seeded")]
    asyncio.run(disturbed(joined, requests, disturb))
    joined.until(placed_anew, 90)
    assert nodes.homes()["tandem-worker-1"] != nodes.ray["decode_node"]
    joined.until(joined.clean, 30)
    assert joined.leaks() == []
    assert joined.end() < 60
