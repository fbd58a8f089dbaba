"""Those who should not get in: bytes on a TCP port, ZeroMQ without the secret, ZeroMQ without our handshake."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import zmq

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.sockets import client_socket


def greeting(mechanism: bytes, major: int = 3) -> bytes:
    """ZMTP's first 64 bytes (rfc.zeromq.org/spec/23)."""
    return b"\xff" + b"\0" * 8 + b"\x7f" + bytes([major, 0]) + mechanism.ljust(20, b"\0") + b"\0" * 32


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content)) + content


def ready(identity: bytes = b"") -> bytes:
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    return command(b"READY", b"".join(bytes([len(k)]) + k + struct.pack(">I", len(v)) + v for k, v in properties))


HUGE_FRAME = b"\x02" + struct.pack(">Q", 2**63 - 1)
RAW = {
    "nothing": b"",
    "one byte": b"\xff",
    "half a greeting": greeting(b"NULL")[:30],
    "an HTTP request": b"GET /metrics HTTP/1.1\r\nHost: tandem\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 506,
    "zeros": b"\0" * 10_000,
    "ones": b"\xff" * 10_000,
    "an old ZMTP": b"\x01\x00" + b"\x06\x00hello" * 100,
    "a ZMTP of the future": greeting(b"NULL", major=99) + ready(),
    "an unknown mechanism": greeting(b"\xff" * 20) + ready(),
    "no mechanism": greeting(b"NULL") + ready() + b"\x00\x05hello" * 1000,
    "no mechanism, a chosen identity": greeting(b"NULL") + ready(b"\0\0\0\0\1") + b"\x00\x05hello",
    "a password": greeting(b"PLAIN") + command(b"HELLO", b"\x05admin\x05admin"),
    "CURVE without its hello": greeting(b"CURVE") + ready() + b"\x00\x05hello",
    "CURVE with a hello of zeros": greeting(b"CURVE") + command(b"HELLO", b"\1\0" + b"\0" * 192),
    "CURVE with a random hello": greeting(b"CURVE") + command(b"HELLO", b"\1\0" + random.Random(1).randbytes(192)),
    "CURVE with a random end": greeting(b"CURVE") + command(b"INITIATE", random.Random(2).randbytes(300)),
    "a frame of eight exabytes": greeting(b"CURVE") + HUGE_FRAME + b"x" * 1000,
    "the same without mechanism": greeting(b"NULL") + ready() + HUGE_FRAME + b"x" * 1000,
    "a message without end": greeting(b"NULL") + ready() + (b"\x03" + struct.pack(">Q", 1 << 20) + b"x" * (1 << 20)) * 40,
    "a flood": greeting(b"NULL") + ready() + b"\x00\x05hello" * 500_000,
}


def where(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


async def say(address: str, data: bytes, patience_s: float = 0.3) -> bytes:
    """Send bytes to a worker's port on a connection of their own; what came back until it was closed or silent for a while."""
    heard = bytearray()
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection(*where(address))
        try:
            async with asyncio.timeout(20):
                writer.write(data)
                await writer.drain()
            with suppress(TimeoutError):
                while part := await asyncio.wait_for(reader.read(1 << 16), patience_s):
                    heard += part
        finally:
            writer.transport.abort()
    return bytes(heard)


@asynccontextmanager
async def idle_connections(address: str, count: int) -> AsyncIterator[None]:
    """Connections that never say anything."""

    def connect() -> list[socket.socket]:
        return [socket.create_connection(where(address), timeout=20) for _ in range(count)]

    connections = await asyncio.to_thread(connect)
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


@contextmanager
def dealer(address: str, secret: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket that knows nothing of our handshake; with the secret, it gets past ZeroMQ's."""
    if secret is None:
        peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
    else:
        peer = client_socket(secret)
    peer.setsockopt(zmq.SNDTIMEO, 5000)
    peer.setsockopt(zmq.RCVTIMEO, 5000)
    peer.connect(address)
    try:
        yield peer
    finally:
        peer.close()


async def answer_to(peer: zmq.Socket[bytes], body: bytes) -> bytes:
    """What a server on this loop answers."""
    peer.send(body)
    return await asyncio.to_thread(peer.recv)


class Recording:
    """Bytes of one connection, as somebody on its way has seen them."""

    def __init__(self) -> None:
        self.address = ""
        self.from_client = bytearray()
        self.from_server = bytearray()


@asynccontextmanager
async def wire_tap(address: str) -> AsyncIterator[Recording]:
    """A relay to a worker that records the connection which is made through it."""
    recording = Recording()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        while part := await reader.read(1 << 16):
            record += part
            writer.write(part)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_worker, to_worker = await asyncio.open_connection(*where(address))
        with suppress(ConnectionError):
            await asyncio.gather(
                copy(reader, to_worker, recording.from_client), copy(from_worker, writer, recording.from_server)
            )
        writer.close()
        to_worker.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        recording.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield recording


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at this process every 10 ms, from its loop: what memory it took, and how long the loop kept others waiting.

    A stall is counted in processor time of the loop's thread. What other processes of a busy machine take is not its fault.
    """

    def __init__(self) -> None:
        self._began = resident_bytes()
        self.most_bytes = 0
        self.longest_stall_s = 0.0

    async def run(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.01)
            now = time.thread_time()
            self.longest_stall_s = max(self.longest_stall_s, now - last)
            self.most_bytes = max(self.most_bytes, resident_bytes() - self._began)
            last = now


@asynccontextmanager
async def watch() -> AsyncIterator[Watch]:
    seen = Watch()
    task = asyncio.create_task(seen.run())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


TOO_LARGE = b"x" * (MAX_MESSAGE_BYTES + 1)
