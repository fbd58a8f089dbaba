"""Entries on two nodes: each serves with its own router, tells of both, and outlives the other's faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.environment import ROOT
from benchmarks.lib.machines import IN_OWN_NETWORK, why_no_machines
from benchmarks.lib.ray_nodes import REDIS

NO_MACHINES = why_no_machines()
NODE = "router-10.77.0.12-0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.skipif(NO_MACHINES is not None, reason=str(NO_MACHINES)),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    script = str(Path(__file__).with_name("entry_nodes.py"))
    command = [*IN_OWN_NETWORK, sys.executable, script]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(700)
def test_each_entry_serves_with_the_router_of_its_node(seen: dict[str, Any]) -> None:
    both = seen["both"]
    assert len(set(both["texts"])) == 1
    assert "Paris" in both["texts"][0]
    assert both["counts"] == [{"router-0": 1, NODE: 3}] * 2, "whichever is asked tells of both"
    assert both["routers"] == [{"wanted": 2, "ready": 2}] * 2


def test_a_stream_of_a_killed_router_goes_on_at_another_node(seen: dict[str, Any]) -> None:
    router = seen["router"]
    assert router["killed"] == 1
    assert router["broken"] is not None
    assert router["had"] > 20
    assert (router["resumed"], router["differs"]) == (None, None)
    assert router["text"] == seen["both"]["texts"][0], "the node has a router again"
    assert router["counts"][NODE] >= 4, "it counts on where the killed one has ended"


def test_a_killed_node_takes_only_its_own_entry_with_it(seen: dict[str, Any]) -> None:
    node = seen["node"]
    assert node["failure"] is None
    assert list(node["counts"]) == ["router-0"]
    assert node["routers"] == [{"wanted": 2, "ready": 1}, {"wanted": 2, "ready": 2}]
    assert node["text"] == seen["both"]["texts"][0], "the node that came back has an entry"


def test_a_node_that_leaves_waits_for_its_routers_streams(seen: dict[str, Any]) -> None:
    left = seen["left"]
    assert left["failure"] is None
    assert (left["code"], "is empty" in left["said"]) == (0, True), left["said"]
    assert left["routers"]["ready"] == 1


def test_nothing_is_left_where_a_node_lives(seen: dict[str, Any]) -> None:
    assert seen["told"] == 2, "what HAProxy is told lies where there are entries"
    killed = 1  # what a machine had when it was killed stays on its disk
    assert seen["left"]["told"] == 1 + killed
    assert (seen["ended"], seen["told_at_end"]) == (0, killed)
