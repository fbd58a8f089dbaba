"""Clients that leave at random moments: nothing is held for them, no process grows. benchmarks.cut_streams is the long run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cut_streams import CONFIG, GROWTH_LIMIT, cut_streams

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(600)  # 280 s on two slow cores without AVX-512
def test_cut_streams_leave_nothing_behind(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
    served = serve("--config", str(config))
    served.wait_ready()
    outcome = asyncio.run(cut_streams(served.url, served.process.pid, streams=200, first=60))
    assert set(outcome.statuses) == {"cut", "whole"}, "no errors"
    assert 30 <= outcome.statuses["cut"] <= 80
    assert outcome.leaks == []
    assert set(outcome.early) == {"router", "controller", "HAProxy", "prefill worker", "decode worker"}
    assert max(outcome.growth.values()) <= GROWTH_LIMIT, outcome
