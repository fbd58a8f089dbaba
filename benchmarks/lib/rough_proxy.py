"""A proxy between clients and a cluster that is as bad as networks can be."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx


class RoughProxy:
    """TCP between clients and the cluster: some connections are slow, and some end in the middle."""

    def __init__(self, url: str, rng: random.Random) -> None:
        """`url` is the cluster's."""
        address = httpx.URL(url)
        self._address = (address.host, address.port)
        self._rng = rng
        self.url = ""
        self.delayed = self.dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RoughProxy]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = self._rng.choice(["delay", "drop"])
        delay_s = self._rng.uniform(0.01, 0.1) if fate == "delay" else 0.0
        left = self._rng.randrange(2_000, 40_000) if fate == "drop" else None
        self.delayed += fate == "delay"
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._address)
        ways = [
            asyncio.create_task(self._pump(reader, upstream_writer, delay_s, None)),
            asyncio.create_task(self._pump(upstream_reader, writer, delay_s, left)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, upstream_writer):
            end.transport.abort()  # both sides see a reset, as when a box on the way gives up

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float, left: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(16_384):
                await asyncio.sleep(delay_s)
                if left is not None and (left := left - len(data)) < 0:
                    self.dropped += 1
                    return
                sink.write(data)
                await sink.drain()
