"""The authenticated sockets over real TCP: who gets in, who does not, and how a loss is noticed."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import zmq

from protocol import wire
from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import ProtocolError, WorkerLostError
from protocol.messages.common import Ping
from protocol.messages.decode import Release
from protocol.sockets import client_socket
from protocol.wire import PeerGone, WireClient, WireServer

SECRET = b"s" * 32


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def serving() -> AsyncIterator[WireServer]:
    server = WireServer(SECRET, "127.0.0.1")
    try:
        yield server
    finally:
        server.close()


def test_messages_travel_both_ways_in_order() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            for number in range(1000):
                client.send(Release(number))
            for number in range(1000):
                peer, message = await server.receive()
                assert message == Release(number)
                server.send(peer, message)
            assert [await client.receive() for _ in range(1000)] == [Release(number) for number in range(1000)]
            client.close()

    run(scenario)


def test_a_burst_waits_for_a_peer_that_is_busy() -> None:
    """More messages than ZeroMQ's own default of 1,000 go into the queue while nobody reads."""

    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            (peer,) = server.peers()
            for number in range(20_000):
                server.send(peer, Release(number))
            assert [await client.receive() for _ in range(20_000)] == [Release(number) for number in range(20_000)]
            client.close()

    run(scenario)


def test_an_oversized_message_ends_its_connection_and_no_other() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            intruder = client_socket(SECRET)
            monitor = intruder.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            intruder.connect(server.address)
            intruder.send(b"x" * (MAX_MESSAGE_BYTES + 1))
            assert await asyncio.to_thread(monitor.poll, 5000), "the server hangs up"
            client.send(Release(1))
            assert (await server.receive())[1] == Release(1)
            intruder.disable_monitor()
            monitor.close()
            intruder.close()
            client.close()

    run(scenario)


def test_simultaneous_traffic_never_stalls() -> None:
    """ZeroMQ signals by edge: a send must not swallow the signal of a message that arrived in between."""

    async def scenario() -> None:
        async with serving() as server:
            clients = [await WireClient.connect(server.address, SECRET, 5) for _ in range(4)]

            async def echo() -> None:
                for _ in range(4 * 500):
                    server.send(*await server.receive())

            async def ping_pong(client: WireClient) -> None:
                for number in range(500):
                    client.send(Release(number))
                    assert await client.receive() == Release(number)

            await asyncio.gather(echo(), *(ping_pong(client) for client in clients))
            for client in clients:
                client.close()

    run(scenario)


def test_a_send_that_fails_loses_no_message_of_another_peer() -> None:
    """It takes ZeroMQ's signal too: of a message that came just before, nobody would hear until the next one."""

    async def scenario() -> None:
        async with serving() as server:
            gone, living = [await WireClient.connect(server.address, SECRET, 5) for _ in range(2)]
            lost = server.peers()[0]
            gone.close()
            with pytest.raises(PeerGone):
                await send_for_ever(server, lost)
            for number in range(50):
                living.send(Release(number))
                assert select.select([int(server._socket.socket.getsockopt(zmq.FD))], [], [], 5)[0]
                with pytest.raises(PeerGone):
                    server.send(lost, Ping())
                assert (await asyncio.wait_for(server.receive(), 5))[1] == Release(number)
            living.close()

    run(scenario)


def test_wrong_secret_is_refused_on_both_sides() -> None:
    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(WorkerLostError, match="cluster secret"):
                await WireClient.connect(server.address, b"wrong" * 8, 5)
            assert server.peers() == []

    run(scenario)


def test_garbage_from_a_proven_peer_is_dropped() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            for garbage in (b"", b"\xc1", os.urandom(1000), b"\x92\x0e\xa1x", b"\x93\x0e\x01\x02"):
                client._send_raw(garbage)
            client.send(Ping())
            assert (await server.receive())[1] == Ping()
            client.close()

    run(scenario)


def test_loss_of_the_server_is_noticed_at_once() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            waiting = asyncio.ensure_future(client.receive())
            await asyncio.sleep(0)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(waiting, 2)
        with pytest.raises(WorkerLostError):
            client.send(Ping())
        client.close()

    run(scenario)


async def send_for_ever(server: WireServer, peer: bytes) -> None:
    while True:
        server.send(peer, Ping())
        await asyncio.sleep(0.001)


def test_loss_of_a_client_is_noticed_when_sending() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            (peer,) = server.peers()
            assert server.heard_at(peer) > time.monotonic() - 5
            client.close()
            with pytest.raises(PeerGone):
                await send_for_ever(server, peer)
            assert server.peers() == []
            assert server.heard_at(peer) == float("-inf")

    run(scenario)


def test_a_client_that_was_given_up_learns_of_it_when_it_speaks() -> None:
    async def scenario() -> None:
        async with serving() as server:
            client = await WireClient.connect(server.address, SECRET, 5)
            client.send(Ping())
            peer, _ = await server.receive()
            server.forget(peer)
            client.send(Ping())
            with pytest.raises(WorkerLostError):
                await client.receive()
            with pytest.raises(WorkerLostError):
                client.send(Ping())
            client.close()

    run(scenario)


def test_a_process_has_many_connections() -> None:
    """ZeroMQ's own limit is 1,023 sockets, and a connection takes three."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 4096:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, limits[0]), limits[1]))
    sockets = []
    try:
        for _ in range(1100):
            sockets.append(client_socket(SECRET))
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_nodes_may_have_ipv6_addresses() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("there is no IPv6 here")

    async def scenario() -> None:
        server = WireServer(SECRET, "::1")
        try:
            client = await WireClient.connect(server.address, SECRET, 5)
            client.send(Release(1))
            assert (await server.receive())[1] == Release(1)
            client.close()
        finally:
            server.close()

    run(scenario)


def test_nobody_there() -> None:
    async def scenario() -> None:
        with pytest.raises(WorkerLostError):
            await WireClient.connect("tcp://127.0.0.1:1", SECRET, 0.5)

    run(scenario)


@pytest.mark.parametrize("address", ["", "x" * 1000, "tcp://", "tcp://127.0.0.1", "ipc:///tmp/x", "inproc://x"])
def test_what_is_no_address_is_named(address: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ProtocolError) as refusal:
            await WireClient.connect(address, SECRET, 5)
        assert refusal.value.param == "address"
        assert len(refusal.value.message) < 200

    run(scenario)


@pytest.mark.parametrize("theirs", [b"tandem/9", b"tandem/18", b"tandem/1000"])
def test_two_versions_refuse_each_other_by_name_at_both_ends(theirs: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A client of one version and a server of another, over a real socket. The process stands for both in turn."""

    async def scenario() -> None:
        async with serving() as server:
            ours = wire.WIRE_VERSION
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(wire, "WIRE_VERSION", theirs)
                connecting = asyncio.ensure_future(WireClient.connect(server.address, SECRET, 5))
                await asyncio.sleep(0)  # the hello is on its way
                patch.setattr(wire, "WIRE_VERSION", ours)
                with pytest.raises(ProtocolError, match=f"another version: it speaks {ours.decode()}"):
                    await connecting
            assert f"it speaks {theirs.decode()}, and this process {ours.decode()}" in caplog.text
            assert server.peers() == []
            client = await WireClient.connect(server.address, SECRET, 5)
            client.close()

    run(scenario)
