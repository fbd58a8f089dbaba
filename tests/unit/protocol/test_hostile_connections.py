"""A live server among strangers, eavesdroppers and peers that know the secret and misbehave; a client of false servers."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import zmq

from protocol.codec import encode
from protocol.errors import WorkerLostError
from protocol.messages.common import Ping
from protocol.messages.decode import Release
from protocol.sockets import _server_key
from protocol.wire import _NONCE_BYTES, WIRE_VERSION, WireClient, WireServer, _prove
from tests.hostile_peers import RAW, TOO_LARGE, answer_to, dealer, idle_connections, say, watch, wire_tap
from tests.unit.protocol.message_values import EXAMPLES

SECRET = b"s" * 32
MIB = 1 << 20
HELLO = WIRE_VERSION + b"n" * _NONCE_BYTES


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


class Served:
    """A server, and a client that all the while asks it something."""

    def __init__(self, server: WireServer) -> None:
        self.server = server
        self.address = server.address
        self.heard: list[object] = []
        """What came from others than the well-behaved client."""
        self.rounds = 0

    async def echo(self) -> None:
        ours: set[bytes] = set()
        while True:
            peer, message = await self.server.receive()
            if isinstance(message, Release) and message.ticket_id == 0:
                ours.add(peer)
            if peer in ours:
                self.server.send(peer, message)
            else:
                self.heard.append(message)

    async def ask(self) -> None:
        client = await WireClient.connect(self.address, SECRET, 5)
        try:
            while True:
                client.send(Release(0))
                async with asyncio.timeout(5):
                    assert await client.receive() == Release(0)
                self.rounds += 1
                await asyncio.sleep(0.001)
        finally:
            client.close()

    async def goes_on(self) -> None:
        """The client gets answers, and so does a new one."""
        async with asyncio.timeout(10):
            for rounds in range(self.rounds, self.rounds + 3):
                while self.rounds <= rounds:  # noqa: ASYNC110 - the client has no event for each answer
                    await asyncio.sleep(0.001)
        client = await WireClient.connect(self.address, SECRET, 5)
        client.send(Release(0))
        assert await client.receive() == Release(0)
        client.close()


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    server = WireServer(SECRET, "127.0.0.1")
    here = Served(server)
    tasks = [asyncio.create_task(here.echo()), asyncio.create_task(here.ask())]
    try:
        yield here
        await here.goes_on()
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in RAW.items()])
def test_raw_bytes_are_refused(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with served() as here, watch() as seen:
            await say(here.address, data)
            await here.goes_on()
            assert here.heard == []
            assert seen.most_bytes < 64 * MIB
            assert seen.longest_stall_s < 2
            assert len(here.server.peers()) <= 2, "the client, and the one that came after"

    run(scenario)
    assert "refused a connection" in caplog.text or "a connection was closed" in caplog.text


def test_random_bytes_and_connections_by_the_thousand(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(os.environ.get("CI") and 1)

    async def scenario() -> None:
        async with served() as here, watch() as seen:
            for _ in range(EXAMPLES // 50):
                openings = [random_opening(rng) for _ in range(50)]
                await asyncio.gather(*(say(here.address, data, 0.02) for data in openings))
            async with idle_connections(here.address, 1000):
                await here.goes_on()
            assert here.heard == []
            assert seen.most_bytes < 64 * MIB

    run(scenario)
    refusals = [record for record in caplog.records if "refused a connection" in record.getMessage()]
    assert 0 < len(refusals) < 60, "said, but not a thousand times"


def random_opening(rng: random.Random) -> bytes:
    """Something that may begin well."""
    begin = rng.choice(list(RAW.values()))[:300]
    return begin[: rng.randrange(len(begin) + 1)] + rng.randbytes(rng.randrange(300))


def test_zeromq_without_the_secret_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served() as here:
            for secret in (None, b"wrong" * 8):
                with dealer(here.address, secret) as stranger:
                    for body in (HELLO, encode(Ping()), b"", os.urandom(100)):
                        with suppress(zmq.Again):  # hung up on
                            stranger.send(body, zmq.DONTWAIT)
                    await here.goes_on()
                    assert stranger.poll(0) == 0, "nothing is answered"
            assert here.heard == []

    run(scenario)
    assert "refused a connection" in caplog.text


def test_a_peer_must_prove_itself_before_it_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ lets in who knows the server's key; that is not enough."""

    async def scenario() -> None:
        async with served() as here:
            for bodies in (
                [encode(Release(1))],
                [os.urandom(64)],
                [HELLO, b"p" * 32, encode(Release(1))],
                [HELLO, HELLO, encode(Release(1))],
                [HELLO[:-1], encode(Release(1))],
                [b"tandem/0" + b"n" * 32, encode(Release(1))],
                [b""],
            ):
                with dealer(here.address, SECRET) as peer:
                    for body in bodies:
                        peer.send(body)
                    assert await asyncio.to_thread(last_of, peer, len(bodies)) == b"", "it is told that it is not known"
            assert here.heard == []

    run(scenario)
    assert "refused a peer" in caplog.text


def last_of(peer: zmq.Socket[bytes], count: int) -> bytes:
    return [peer.recv() for _ in range(count)][-1]


def test_proofs_are_good_for_one_connection_and_one_side() -> None:
    async def scenario() -> None:
        async with served() as here:
            with dealer(here.address, SECRET) as one, dealer(here.address, SECRET) as other:
                challenges = [await answer_to(peer, HELLO) for peer in (one, other)]
                nonces = [challenge[:_NONCE_BYTES] for challenge in challenges]
                assert nonces[0] != nonces[1], "the same hello gets another challenge"
                right = [_prove(SECRET, b"client", b"n" * _NONCE_BYTES, nonce) for nonce in nonces]
                assert await answer_to(one, right[0]) == WIRE_VERSION
                assert await answer_to(other, right[0]) == b"", "another connection's proof"
            with dealer(here.address, SECRET) as mirror:
                challenge = await answer_to(mirror, HELLO)
                assert await answer_to(mirror, challenge[_NONCE_BYTES:]) == b"", "the server's own proof"
                # A nonce of the server's as our own: what it proves then is still no client's proof.
                challenge = await answer_to(mirror, WIRE_VERSION + challenge[:_NONCE_BYTES])
                assert await answer_to(mirror, challenge[_NONCE_BYTES:]) == b""
            assert here.heard == []

    run(scenario)


def test_a_recorded_session_is_worth_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served() as here, wire_tap(here.address) as tap:
            client = await WireClient.connect(tap.address, SECRET, 5)
            for number in range(1, 4):
                client.send(Release(number))
            await until(lambda: len(here.heard) == 3)
            client.close()
            said, heard = bytes(tap.from_client), bytes(tap.from_server)
            public_key = zmq.curve_public(_server_key(SECRET))
            for known in (SECRET, WIRE_VERSION, encode(Release(3)), public_key, zmq.utils.z85.decode(public_key)):
                assert known not in said + heard, "nothing is readable on the way"
            caplog.clear()
            for replay in (said, said[:64], said[:300], said[64:], heard, heard[64:], said[:64] + heard[64:]):
                await say(here.address, replay)
            await here.goes_on()
            assert here.heard == [Release(1), Release(2), Release(3)]

    run(scenario)
    assert "refused a connection" in caplog.text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


def test_a_flood_of_a_known_peer_leaves_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """Small messages, garbage, large ones, and what is too large, from threads that send as fast as they can."""

    def flood(address: str, bodies: list[bytes]) -> None:
        with dealer(address, SECRET) as peer:
            peer.send(HELLO)
            peer.send(_prove(SECRET, b"client", b"n" * _NONCE_BYTES, peer.recv()[:_NONCE_BYTES]))
            for body in bodies:
                peer.send(body)

    large = encode(Release(1)) + b"\0" * (4 * MIB)

    async def scenario() -> None:
        async with served() as here:
            for bodies in ([encode(Ping())] * 50_000, [b"\xc1"] * 50_000, [large] * 100, [TOO_LARGE]):
                before = here.rounds
                async with watch() as seen:
                    await asyncio.to_thread(flood, here.address, bodies)
                    await here.goes_on()
                assert here.rounds > before
                assert seen.longest_stall_s < 2
                assert seen.most_bytes < 700 * MIB
            assert set(map(type, here.heard)) == {Ping}

    run(scenario)
    assert 0 < sum("dropped a message" in record.getMessage() for record in caplog.records) < 200


def test_a_client_believes_no_false_server(caplog: pytest.LogCaptureFixture) -> None:
    """One that only echoes, one that speaks ZeroMQ without the secret, and one that has recorded a true one."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with served() as here, wire_tap(here.address) as tap:
            (await WireClient.connect(tap.address, SECRET, 5)).close()
            recorded = bytes(tap.from_server)

            async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while part := await reader.read(1 << 16):
                    writer.write(part)
                writer.close()

            async def parrot(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(recorded)
                await reader.read()
                writer.close()

            for behave in (mirror, parrot):
                false = await asyncio.start_server(behave, "127.0.0.1", 0)
                async with false:
                    port = false.sockets[0].getsockname()[1]
                    with pytest.raises(WorkerLostError):
                        await WireClient.connect(f"tcp://127.0.0.1:{port}", SECRET, 1)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        with context.socket(zmq.ROUTER) as plain:
            port = plain.bind_to_random_port("tcp://127.0.0.1")
            with pytest.raises(WorkerLostError):
                await WireClient.connect(f"tcp://127.0.0.1:{port}", SECRET, 1)
            assert plain.poll(0) == 0, "the client says nothing to it"

    run(scenario)
