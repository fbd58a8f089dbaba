"""A worker's side of the wire over real sockets: who hears of its load, and when."""

from __future__ import annotations

import asyncio

from protocol.endpoint import Endpoint
from protocol.messages import LoadReport, Ping
from protocol.wire import WireClient, WireServer
from tests.unit.load_reports import load_report

SECRET = b"s" * 32
HEARTBEAT_S = 60.0


def test_a_peer_that_is_new_hears_at_once() -> None:
    """A router that has just begun knows what its workers do before it is asked anything."""

    async def scenario() -> None:
        server = WireServer(SECRET, "127.0.0.1")
        endpoint = Endpoint(server, lease_s=HEARTBEAT_S, heartbeat_s=HEARTBEAT_S)
        running = asyncio.create_task(endpoint.run({}, lambda: load_report("decode-0", epoch=5), lambda peer: None))
        try:
            for _ in range(2):
                client = await WireClient.connect(server.address, SECRET, 5)
                client.send(Ping())
                async with asyncio.timeout(10):
                    assert isinstance(await client.receive(), LoadReport)
                client.close()
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())
