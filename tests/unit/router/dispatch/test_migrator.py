"""What streams that can't move cost their router."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import ClusterConfig
from protocol.sampling import SamplingParams
from router.dispatch.journal import Journal
from router.dispatch.migrator import Migrator
from router.dispatch.running import Running
from tests.unit.simulated_time import run_in_simulated_time

STREAMS = 8


def _any(**values: Any) -> Any:
    return SimpleNamespace(**values)


def test_a_drain_for_which_nobody_has_room_is_not_looked_at_with_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty load reports in a second."""
    looked: list[Running] = []

    async def scenario() -> None:
        leaving: Any = object()
        roster = _any(to_empty=lambda: [leaving], successors=lambda *args: iter(()), ready_decode=lambda worker_id: None)
        migrator = Migrator(ClusterConfig(), roster, _any())
        need_blocks = migrator._need_blocks

        def noted(running: Running) -> int:
            looked.append(running)
            return need_blocks(running)

        monkeypatch.setattr(migrator, "_need_blocks", noted)
        for _ in range(STREAMS):
            journal = Journal(tuple(range(100)), SamplingParams(seed=1, max_tokens=50), "", emitted=[1, 2])
            migrator._running.add(Running(_any(decode=leaving, ended=False), journal))
        for _ in range(20):
            migrator._empty_draining()
            await asyncio.sleep(0.05)

    run_in_simulated_time(scenario())
    assert STREAMS <= len(looked) <= 5 * STREAMS
