"""Workers are killed and stopped, connections delayed and dropped, clients slow and cut off; what is said stays exact.

`make chaos` runs the same for twenty minutes. TANDEM_CHAOS_S: seconds of it; TANDEM_CHAOS_SEED: another schedule.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.chaos import Chaos, WorkerFaults, growing, worker_fault
from benchmarks.lib.streams import KINDS, Request

pytestmark = [pytest.mark.slow, pytest.mark.long]

SECONDS = float(os.environ.get("TANDEM_CHAOS_S", "45"))
SEED = int(os.environ.get("TANDEM_CHAOS_SEED", "1"))
SOAK = SECONDS >= 600
GAP_S = 20.0 if SOAK else 5.0
LEASE_S = 3.0
CONFIG = f"""
disaggregation: always
limits: {{lease_s: {LEASE_S}, heartbeat_s: 0.5}}
prefill: {{workers: 2, kv_cache_tokens: 16384}}
decode: {{workers: 2, kv_cache_tokens: 16384}}
"""


@pytest.mark.timeout(SECONDS + 600)
def test_nothing_is_lost_doubled_or_changed(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "chaos.yaml"
    config.write_text(CONFIG)
    cluster = serve("--config", str(config))
    try:
        cluster.wait_ready()
        cluster.until(lambda: cluster.settled(2, 2), 90)
        rng = random.Random(SEED)
        schedule = [worker_fault(rng, (number + 1) * GAP_S, LEASE_S) for number in range(int(SECONDS / GAP_S))]
        requests = [Request(kind, number, 200 if SOAK else 60) for number in range(2) for kind in KINDS]
        chaos = Chaos(cluster, requests, WorkerFaults(cluster, rng), schedule, seed=SEED, seconds=SECONDS)
        report = asyncio.run(chaos.run())
        cluster.until(lambda: cluster.settled(2, 2), 120)
        cluster.until(cluster.clean, 30)
        report.problems += [f"leak: {leak}" for leak in cluster.leaks()]
        if SOAK:
            report.problems += growing(report, 0.05, 4.0)
        print(f"\n{report.markdown()}")  # noqa: T201
        assert report.problems == []
        assert report.outcomes["exact"] > 0
    finally:
        cluster.end()
