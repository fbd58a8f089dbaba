"""Nodes are killed, lose their power, are cut off, and the head moves to another machine: each stream says what it would have.

The cluster is that of `benchmarks.node_faults`, on machines that are network namespaces, at a small scale. `make chaos` has
more of it: TANDEM_NODE_FAULTS_SCALE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.environment import ROOT
from benchmarks.lib.machines import why_no_machines
from benchmarks.lib.ray_nodes import REDIS

SCALE = os.environ.get("TANDEM_NODE_FAULTS_SCALE", "0.01")
NO_MACHINES = why_no_machines()
LEASE_S = 3.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
    pytest.mark.skipif(NO_MACHINES is not None, reason=str(NO_MACHINES)),
]


def rows_of(tmp_path: Path, leases: str, faults: str) -> dict[str, dict[str, Any]]:
    """What befell a cluster, by fault. Every answer was finished, and the undisturbed one; nothing is held for nobody."""
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.node_faults", "--scale", SCALE, "--tokens", "120"]
    command += ["--leases", leases, "--faults", faults, "--rows", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    print(done.stdout)  # noqa: T201
    rows = json.loads(file.read_text())
    for row in rows:
        assert (row["finished"], row["exact"], row["differences"]) == (row["streams"], row["streams"], [])
        assert row["leaks"] == []
    return {row["fault"]: row for row in rows}


@pytest.mark.timeout(1800)
def test_a_node_that_is_cut_off_changes_no_answer(tmp_path: Path) -> None:
    row = rows_of(tmp_path, f"{LEASE_S:g}", "cut")["cut"]
    assert row["resumed"]
    assert max(row["longest_gaps_s"]) > LEASE_S, "what is cut off says nothing, and nobody is told"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_lost_nodes_and_a_partition_change_no_answer(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"{LEASE_S:g}", "kill,power,part")
    assert list(rows) == ["kill", "power", "part"]
    assert all(rows[fault]["resumed"] for fault in ("kill", "power"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_another_head_takes_up_the_workers_and_every_answer_ends(tmp_path: Path) -> None:
    row = rows_of(tmp_path, "10", "head")["head"]
    assert all(row["taken_up"]), "the workers of other nodes live on"
    assert row["resumed"], "records of streams are kept on another node than the head"
    assert row["asked_anew"], "who did not come back to a stream had to ask anew"
