"""A worker's side of the wire over real sockets: who hears of its load, and when."""

from __future__ import annotations

import asyncio

from protocol.endpoint import Endpoint
from protocol.messages.common import Ping
from protocol.messages.load import LoadReport
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
                client.send(Ping(wants_load=True))
                async with asyncio.timeout(10):
                    assert isinstance(await client.receive(), LoadReport)
                client.close()
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())


def test_load_is_told_to_those_alone_that_want_it() -> None:
    """Others, such as the prefill workers of a decode worker, get as many beats as there are heartbeats."""

    async def scenario() -> None:
        server = WireServer(SECRET, "127.0.0.1")
        endpoint = Endpoint(server, lease_s=HEARTBEAT_S, heartbeat_s=0.5)
        running = asyncio.create_task(endpoint.run({}, lambda: load_report("decode-0", epoch=5), lambda peer: None))
        router, other = [await WireClient.connect(server.address, SECRET, 5) for _ in range(2)]
        router.send(Ping(wants_load=True))
        other.send(Ping())
        try:
            num_beats = 0
            async with asyncio.timeout(30):
                while num_beats < 3:
                    heard = asyncio.create_task(other.receive())
                    while not heard.done():
                        endpoint.load_changed()
                        assert isinstance(await router.receive(), LoadReport)
                    assert await heard == Ping()
                    num_beats += 1
        finally:
            router.close()
            other.close()
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())


def test_a_peer_that_never_speaks_is_given_up_after_a_lease() -> None:
    """It proves that it knows the secret, and would be kept for ever."""

    async def scenario() -> None:
        server, lost = WireServer(SECRET, "127.0.0.1"), list[bytes]()
        endpoint = Endpoint(server, lease_s=1.0, heartbeat_s=0.1)
        running = asyncio.create_task(endpoint.run({}, lambda: load_report("decode-0", epoch=5), lost.append))
        try:
            silent = await WireClient.connect(server.address, SECRET, 5)
            speaks = await WireClient.connect(server.address, SECRET, 5)
            assert len(server.peers()) == 2
            async with asyncio.timeout(20):
                while len(server.peers()) == 2:
                    speaks.send(Ping())
                    await asyncio.sleep(0.05)
            [left] = server.peers()
            assert endpoint.is_connected(left), "the one that speaks"
            assert lost == [], "the other one owned nothing"
            silent.close()
            speaks.close()
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(scenario())
