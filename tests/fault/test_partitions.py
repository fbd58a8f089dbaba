"""Two workers that don't reach each other while the router reaches both: nothing hangs, and what comes late harms nobody.

Between them is a wire that can be cut: it stays up, and brings nothing until it is healed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from protocol.errors import KvTransferError
from protocol.messages.common import Failed
from protocol.messages.decode import Release
from protocol.messages.workers import Ticket
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, with_lease

PROMPT = prompt_of(60)
LEASE_S = 2.0


class Wire:
    """TCP to one address, through a port of its own."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.removeprefix("tcp://").split(":")
        self._whole = asyncio.Event()
        self._whole.set()
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self._whole.set()
            server.close()

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def to(self, ticket: Ticket) -> Ticket:
        """The ticket, whose worker is to be reached through here."""
        return replace(ticket, worker=replace(ticket.worker, address=self.address))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        ways = [
            asyncio.create_task(self._pump(reader, there_writer)),
            asyncio.create_task(self._pump(there_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, there_writer):
            end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()


@pytest.mark.parametrize("open_before", [True, False])
def test_prefill_says_what_decode_cannot_hear(two_workers: Factory, reference: Reference, open_before: bool) -> None:
    async def scenario() -> None:
        async with two_workers(with_lease(CONFIG, LEASE_S)) as workers, Wire(workers.decode.me.address).running() as wire:
            router = await workers.router()
            late: list[Failed] = []
            router.prefill._on_late_failure = late.append

            async def through(wire: Wire, prompt: list[int]) -> list[int]:
                ticket = wire.to(await router.reserve(prompt, 20))
                first = await router.compute(ticket, prompt, greedy(20))
                await router.attach(ticket, first, greedy(20))
                tokens = [first.token_id, *await router.rest(ticket)]
                router.decode.send(Release(ticket.ticket_id))
                return tokens

            if open_before:
                assert await through(wire, prompt_of(30)) == reference(prompt_of(30), 20)
            wire.cut()
            ticket = wire.to(await router.reserve(PROMPT, 20))
            if open_before:
                first = await router.compute(ticket, PROMPT, greedy(20))
                await workers.until(lambda: bool(late))
                assert (late[0].call_id, late[0].code) == (first.call_id, KvTransferError.code)
            else:
                with pytest.raises(Exception, match=f"did not answer within {LEASE_S:g} s"):
                    await router.compute(ticket, PROMPT, greedy(20))
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)
            workers.check()
            wire.heal()
            assert await through(wire, PROMPT) == reference(PROMPT, 20)
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())
