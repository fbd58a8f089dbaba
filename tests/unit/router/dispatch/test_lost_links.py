"""A link that ends fails its streams and what is asked over it, whenever that is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.schema import LimitsConfig
from protocol.audit import Audit
from protocol.errors import WorkerLostError
from protocol.gang import STEP_LEASES
from protocol.messages.common import Ping
from protocol.messages.load import LoadReport
from protocol.messages.prefill import Prefill
from protocol.messages.workers import WorkerRef
from protocol.sampling import SamplingParams
from protocol.wire import WireClient, WireServer
from router.dispatch import claim
from router.dispatch.claim import Claim
from router.dispatch.connection import Connection
from router.dispatch.journal import Journal
from router.dispatch.links import WorkerLink
from router.rules.caching.caches import Caches
from tests.unit.load_reports import prefill_report


class Breakable:
    """One that breaks when it is told to. Stands in for `WireClient`."""

    given_up = False

    @property
    def lost(self) -> bool:
        return self.broken.is_set()

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
        connection = Breakable()
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
        connection = Breakable()
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


@pytest.mark.parametrize("given_up", [True, False])
def test_only_a_worker_that_is_gone_has_died(given_up: bool) -> None:
    """A router that was held for longer than a lease is given up by workers that live: none of them died of its requests."""

    async def scenario() -> None:
        secret = b"s" * 32
        server = WireServer(secret, "127.0.0.1")
        client = await WireClient.connect(server.address, secret, 5)
        ref = WorkerRef("decode-0", 1, server.address)
        link = WorkerLink(ref, client, LimitsConfig(heartbeat_s=0.01), lambda: None, lambda: None)
        running = asyncio.create_task(link.run())
        peer, _ = await server.receive()
        if given_up:
            server.forget(peer)
        else:
            server.close()
        reason = await running
        server.close()
        assert link.died is not given_up
        assert reason == ("the worker had given this router up" if given_up else "the connection broke")

    asyncio.run(asyncio.wait_for(scenario(), 5))


class Reporting(Breakable):
    """A worker that owes an answer, and sends the same report over and over."""

    def __init__(self, report: LoadReport, every_s: float) -> None:
        super().__init__()
        self.report = report
        self.every_s = every_s

    async def receive(self) -> Any:
        await asyncio.sleep(self.every_s)
        return self.report


@pytest.mark.parametrize(
    ("transfers", "step_age_s", "stays"),
    [(1, 0.0, True), (0, 0.0, False), (1, 1.0, False)],
    ids=["moves KV", "does nothing", "is stuck in a step"],
)
def test_a_worker_that_makes_no_step_is_lost_unless_it_moves_kv(transfers: int, step_age_s: float, stays: bool) -> None:
    """A prompt whose KV comes from another worker, over a slow network, has no step for as long as that takes."""
    limits = LimitsConfig(heartbeat_s=0.02, lease_s=0.2)

    async def scenario() -> None:
        ref = WorkerRef("prefill-0", 1, "tcp://127.0.0.1:1")
        report = replace(prefill_report("prefill-0"), transfers=transfers, step_age_s=step_age_s)
        client = cast(WireClient, Reporting(report, limits.heartbeat_s))
        link = WorkerLink(ref, client, limits, lambda: None, lambda: None)
        running = asyncio.create_task(link.run())
        asking = asyncio.create_task(link.calls.prefill(cast("type[Prefill]", lambda call_id: None)))
        await asyncio.wait({running}, timeout=1.5 * STEP_LEASES * limits.lease_s if stays else None)
        assert stays is not running.done()
        running.cancel()
        asking.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
        assert link.gone.result() == ("the link was closed" if stays else "it made no step for 1.2 s")

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def _send_for_ever(client: WireClient) -> None:
    while True:
        client.send(Ping())
        await asyncio.sleep(0.001)


def test_who_asks_over_a_lost_connection_is_not_told_of_another_worker() -> None:
    """ZeroMQ's thread may notice the loss before the connection is read again."""

    async def scenario() -> None:
        secret = b"s" * 32
        server = WireServer(secret, "127.0.0.1")
        client = await WireClient.connect(server.address, secret, 5)
        ref = WorkerRef("decode-0", 1, server.address)
        connection = Connection(ref, client, lambda message: None, lambda: None)
        server.close()
        with pytest.raises(WorkerLostError):
            await _send_for_ever(client)
        with pytest.raises(WorkerLostError, match="decode-0 was lost"):
            await connection.ask(Audit, 5)
        assert connection.gone.done()
        assert connection.died_at is not None
        client.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def _silent(gone: asyncio.Future[str]) -> Any:
    """A worker that answers no question, and is lost when `gone` is done."""

    async def ask(*question: object) -> None:
        await asyncio.get_running_loop().create_future()

    lost = SimpleNamespace(lost_error=lambda: WorkerLostError("it is lost"))
    streams = SimpleNamespace(open=lambda ticket_id: None)
    return SimpleNamespace(gone=gone, connection=lost, streams=streams, calls=SimpleNamespace(prefill=ask, attach=ask))


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("attaches", [False, True])
def test_a_request_that_is_left_while_its_worker_is_lost_ends(
    attaches: bool, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves so many turns of the loop after the loss. Once it went on to its next attempt, for nobody."""
    monkeypatch.setattr(claim, "_DECODE_SAYS_S", 0.0)

    async def scenario() -> None:
        gone, stays = (asyncio.get_running_loop().create_future() for _ in range(2))
        prefill, decode = _silent(gone if attaches else stays), _silent(stays if attaches else gone)
        parts: Any = SimpleNamespace(
            decode=decode, ticket=SimpleNamespace(ticket_id=1), link=prefill, waits=True, fetch=None, num_tokens=2
        )
        sampling, nothing = SamplingParams(seed=0, max_tokens=4), cast(Any, None)
        journal = Journal((1, 2), sampling, "")
        attempt = Claim("a", parts, parts, journal, nothing, nothing, parts)
        working = asyncio.create_task(attempt.attach(1, sampling, 1) if attaches else attempt._first_there(journal))
        await asyncio.sleep(0)
        gone.set_result("it broke")
        for _ in range(turns):
            await asyncio.sleep(0)
        if not working.done():
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working

    asyncio.run(scenario())
