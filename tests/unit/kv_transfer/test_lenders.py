"""Connections to workers that are asked for blocks."""

from __future__ import annotations

import asyncio
import time

import pytest

from configs.schema import LimitsConfig
from kv_transfer.fetching.lenders import Lenders
from protocol.errors import WorkerLostError
from protocol.messages.workers import WorkerRef


def test_a_lender_that_takes_a_connection_and_says_nothing_is_waited_for_no_longer_than_a_lease() -> None:
    async def scenario() -> None:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        lenders = Lenders(b"s" * 32, LimitsConfig(lease_s=0.5, heartbeat_s=0.1, connect_s=5.0))
        began = time.monotonic()
        with pytest.raises(WorkerLostError):
            await lenders.caller(WorkerRef("decode-0", 1, f"tcp://{host}:{port}"))
        assert time.monotonic() - began < 4.0
        await lenders.close()
        silent.close()

    asyncio.run(scenario())
