"""Which pairs a worker keeps with the lives of another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from configs.schema import LimitsConfig
from kv_transfer.peers import DecodePeers
from kv_transfer.sender import SendingPair
from protocol.messages.workers import WorkerRef
from tests.unit.kv_transfer.two_ends import LAYOUT, PREFILL, SECRET


class Pair:
    """Open until it is closed."""

    pushes_in_flight = 0

    def __init__(self) -> None:
        self.broken = False

    async def close(self) -> None:
        self.broken = True


def test_only_a_newer_life_of_a_worker_parts_it_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router with an old view may still hand over to the older life, which answers."""

    async def opened(*args: Any, **kwargs: Any) -> Pair:
        return Pair()

    monkeypatch.setattr(SendingPair, "open", opened)
    former, newer = (WorkerRef("decode-1", epoch, f"tcp://127.0.0.1:{epoch + 1}") for epoch in (1, 2))

    async def main() -> None:
        peers = DecodePeers(PREFILL, SECRET, LAYOUT, 1, [], LimitsConfig())
        first = await peers.pair(former)
        second = await peers.pair(newer)
        await asyncio.sleep(0)
        assert [first.broken, second.broken] == [True, False]
        again = await peers.pair(former)
        assert await peers.pair(newer) is second
        assert [again.broken, second.broken] == [False, False]
        await peers.close()
        assert [again.broken, second.broken] == [True, True]

    asyncio.run(main())
