"""A router that behaves, among peers that know the secret and don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from protocol.codec import encode
from protocol.errors import OverloadedError, WorkerLostError
from protocol.messages.common import Ping
from protocol.messages.load import LoadReport
from protocol.wire import WireClient
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of
from tests.fault.two_workers import SECRET, ScriptedRouter, TwoWorkers
from tests.hostile_peers import watch

MIB = 1 << 20
PROMPT = prompt_of(40, 3)


class Company:
    """A router that behaves, and asks all the time."""

    def __init__(self, workers: TwoWorkers, router: ScriptedRouter, expected: list[int]) -> None:
        self.workers = workers
        self.addresses = (workers.prefill.me.address, workers.decode.me.address)
        self.router = router
        self.answers = 0
        self._expected = expected

    async def ask(self) -> None:
        """Again when there is no room, as routers do: who knows the secret may hold what a router may hold."""
        while True:
            try:
                answer = await self.router.generate(PROMPT, greedy(8), cache_salt=str(self.answers))
            except OverloadedError:
                await asyncio.sleep(0.02)
                continue
            assert answer == self._expected
            self.answers += 1

    async def goes_on(self) -> None:
        """One more answer to a question that was put after this call."""
        enough = self.answers + 2
        await self.workers.until(lambda: self.answers >= enough, 20)


@asynccontextmanager
async def company(two_workers: Factory, reference: Reference) -> AsyncIterator[Company]:
    expected = reference(PROMPT, 8)
    async with two_workers() as workers:
        here = Company(workers, await workers.router(), expected)
        asking = asyncio.create_task(here.ask())
        try:
            async with watch() as seen:
                yield here
                if asking.done():
                    asking.result()
                await here.goes_on()
            assert seen.longest_stall_s < 3
            assert seen.most_bytes < 500 * MIB
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        await workers.until(workers.all_free, 10)
        workers.check()


class Insider:
    """A peer that knows the secret. `send` puts anything on the wire; `failures` are the refusals it got."""

    def __init__(self, client: WireClient) -> None:
        self.client = client
        self.answers: list[Any] = []
        self._reading = asyncio.create_task(self._read())
        self._pinging = asyncio.create_task(self._ping())

    async def _read(self) -> None:
        with suppress(WorkerLostError):
            while True:
                message = await self.client.receive()
                if not isinstance(message, LoadReport | Ping):
                    self.answers.append(message)

    async def _ping(self) -> None:
        with suppress(WorkerLostError):
            while True:
                self.send(Ping())
                await asyncio.sleep(0.1)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.client._send_raw(message if isinstance(message, bytes) else encode(message))

    async def answer_to(self, call_id: int) -> Any:
        async with asyncio.timeout(10):
            while True:
                for message in self.answers:
                    if getattr(message, "call_id", None) == call_id:
                        return message
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        self._pinging.cancel()
        self.client.close()
        await self._reading


@asynccontextmanager
async def insiders(addresses: tuple[str, ...]) -> AsyncIterator[list[Insider]]:
    peers = [Insider(await WireClient.connect(address, SECRET, 5)) for address in addresses]
    try:
        yield peers
    finally:
        for peer in peers:
            await peer.close()
