"""A head node with Redis is lost and comes back: its `tandem serve` takes up the cluster that Ray has restored."""

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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.skipif(NO_MACHINES is not None, reason=str(NO_MACHINES)),
]


@pytest.mark.timeout(500)
def test_tandem_serve_takes_up_the_cluster_of_a_head_that_came_back() -> None:
    command = [*IN_OWN_NETWORK, sys.executable, str(Path(__file__).with_name("lost_head.py"))]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    code, said = seen["second"]
    assert code == 2, said
    assert "runs on this Ray cluster already" in said, "a second one beside the first is refused"
    assert seen["after"] == seen["before"], "the same answer, and the same processes in the same epochs"
    assert seen["codes"] == [0, 0]
    text, lives = seen["anew"]
    assert text == seen["before"][0]
    assert {pid for pid, _ in lives.values()}.isdisjoint(pid for pid, _ in seen["before"][1].values()), "they had ended"
