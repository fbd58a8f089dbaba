"""A link that ends fails its streams, whenever it is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from configs.schema import LimitsConfig
from protocol.errors import WorkerLostError
from protocol.messages.workers import WorkerRef
from protocol.wire import WireClient
from router.dispatch.links import WorkerLink
from router.rules.caching.caches import Caches


class Connection:
    """One that breaks when it is told to. Stands in for `WireClient`."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()

    def send(self, message: Any) -> None:
        if self.broken.is_set():
            raise WorkerLostError("it is broken")

    async def receive(self) -> Any:
        await self.broken.wait()
        raise WorkerLostError("it broke")

    def close(self) -> None:
        self.broken.set()


@pytest.mark.parametrize("turns", range(8))
def test_streams_fail_though_the_next_life_is_heard_of_meanwhile(turns: int) -> None:
    """The roster cancels a link when the controller says that the worker has begun anew, so many turns of the loop after the
    connection broke."""

    async def scenario() -> None:
        connection = Connection()
        ref = WorkerRef("decode-0", 1, "tcp://127.0.0.1:1")
        link = WorkerLink(ref, cast(WireClient, connection), LimitsConfig(), lambda: None, lambda: None)
        stream = link.streams.open(1)
        running = asyncio.create_task(link.run())
        await asyncio.sleep(0)
        connection.broken.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        async with asyncio.timeout(1):
            with pytest.raises(WorkerLostError):
                await stream.take()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_each_beat_tells_how_long_a_worker_has_not_said_what_it_holds() -> None:
    ages: list[float] = []
    told = asyncio.Semaphore(0)

    def tell(age: float) -> None:
        ages.append(age)
        told.release()

    async def scenario() -> None:
        connection = Connection()
        ref = WorkerRef("decode-0", 1, "tcp://127.0.0.1:1")
        limits = LimitsConfig(heartbeat_s=0.01)
        link = WorkerLink(ref, cast(WireClient, connection), limits, lambda: None, lambda: None, Caches(on_age=tell))
        running = asyncio.create_task(link.run())
        await told.acquire()
        await told.acquire()
        connection.broken.set()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 5))
    assert 0 < ages[0] < ages[1]
    assert ages[-1] == 0.0, "nothing is expected of a worker whose link is lost"
