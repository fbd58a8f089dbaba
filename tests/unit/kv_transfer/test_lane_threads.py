"""A lane's thread computes by itself, though torch would give it helpers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.lanes import view_of
from kv_transfer.pool_view import CpuPoolView, PoolView
from kv_transfer.transport import TransportError
from kv_transfer.transports.shared_memory import SharedMemorySender
from tests.torch_threads import torch_threads
from tests.unit.kv_transfer.two_ends import pool, until, world


@pytest.fixture
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")
def test_a_lane_has_no_helpers_and_takes_none_from_others(two_threads: None) -> None:
    view = view_of(pool().layers())
    with ThreadPoolExecutor(1, initializer=view.begin_thread) as lane, ThreadPoolExecutor(1) as engine:
        assert lane.submit(torch.get_num_threads).result(timeout=10) == 1
        assert engine.submit(torch.get_num_threads).result(timeout=10) == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("ends", ["closed", "refused", "cancelled"])
def test_a_lane_gives_back_what_its_thread_took(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Also one that could not be connected, and one that nobody waited for any more when it was."""
    taken: Counter[PoolView] = Counter()
    connecting, goes_on, connect = threading.Event(), threading.Event(), SharedMemorySender.connect_sender

    def connect_sender(*what: Any) -> Any:
        if ends == "refused":
            raise TransportError("no")
        connecting.set()
        assert goes_on.wait(20)
        return SimpleNamespace(close=lambda: None) if ends == "cancelled" else connect(*what)

    monkeypatch.setattr(CpuPoolView, "begin_thread", lambda view: taken.update([view]))
    monkeypatch.setattr(CpuPoolView, "end_thread", lambda view: taken.subtract([view]))
    monkeypatch.setattr(SharedMemorySender, "connect_sender", connect_sender)

    async def scenario() -> None:
        async with world(["shared_memory"]) as w:
            opening = asyncio.create_task(w.pair())
            if ends == "cancelled":
                assert await asyncio.to_thread(connecting.wait, 20)
                opening.cancel()
            goes_on.set()
            await asyncio.wait((opening,))
            if ends == "closed":
                assert sum(taken.values()) == 2, "one on either side"
                await opening.result().close()
            for pair in w.decode.pairs.values():
                await pair.close()
            assert taken
            await until(lambda: not any(taken.values()))

    asyncio.run(scenario())
