"""Prefill's end of the handoff: one SendingPair per decode worker that is being sent to.

    announce ──► posted ──► first layers … last layers ──► (next push) … ──► commit ──► committed

A push is what one prefill step adds to the transfers of one decode worker. It is announced before the step computes, so
that decode has posted its receives by the time the first layers are there, and these travel while the next are computed.
Pushes leave in the order of their announcements: one pump task and one thread per pair see to it.

Who frees: nobody here. The prefill worker keeps its blocks until `push` and `commit` have returned or raised. A pair that
fails once is broken for good: everything on it raises KvTransferError, and the next request opens a new pair.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kv_transfer.fingerprint import BlockFingerprints
from kv_transfer.plan import cut, layer_groups, slot_runs
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.rendezvous import offer
from kv_transfer.transport import SendChannel, SendTransport, TransportError
from protocol.calls import Caller, expect
from protocol.errors import KvTransferError, TandemError
from protocol.messages import (
    Committed,
    KvLayout,
    PairClosed,
    PairOpen,
    PairOpened,
    Ping,
    PushAnnounce,
    PushCommit,
    PushPosted,
    PushSegment,
    Ticket,
    TransferAbort,
    WorkerRef,
)
from protocol.wire import WireClient

log = logging.getLogger(__name__)


class StepSignal:
    """How far the engine's current step has come, told from the engine's thread to the transfer threads."""

    def __init__(self) -> None:
        self._layers_done = 0
        self._wanted: list[int] = []
        self._changed = threading.Condition()

    def layer_done(self, layer: int) -> None:
        """K and V of this layer are in the pool."""
        with self._changed:
            self._layers_done = layer + 1
            if layer in self._wanted:  # waking a thread for nothing would take the interpreter from the engine
                self._changed.notify_all()

    def finish(self) -> None:
        """The step is over and its first tokens are on their way."""
        with self._changed:
            self._layers_done = sys.maxsize
            self._changed.notify_all()

    def wait_for(self, layer: int, deadline_s: float) -> None:
        with self._changed:
            self._wanted.append(layer)
            if not self._changed.wait_for(lambda: self._layers_done > layer, deadline_s):
                raise TransportError(f"layer {layer} was not computed within {deadline_s:g} s")
            self._wanted.remove(layer)


@dataclass
class OutgoingTransfer:
    """One ticket's transfer as prefill sees it."""

    ticket: Ticket
    fingerprints: BlockFingerprints = field(default_factory=BlockFingerprints)
    sent_tokens: int = 0
    refused: bool = False
    """Decode no longer has the ticket: nothing more is sent."""


@dataclass(frozen=True)
class PushPart:
    """Tokens [start, start + num_tokens) of one transfer, which lie in these blocks of the local pool."""

    transfer: OutgoingTransfer
    block_table: Sequence[int]
    start: int
    num_tokens: int


@dataclass
class _Push:
    step: StepSignal
    parts: Sequence[PushPart]
    posted: asyncio.Task[object]
    done: asyncio.Future[None]


class SendingPair:
    """Made by `open`, which starts its tasks; `close` ends them."""

    def __init__(
        self,
        me: WorkerRef,
        peer: WorkerRef,
        layout: KvLayout,
        client: WireClient,
        pool: PoolView,
        *,
        lease_s: float,
        heartbeat_s: float,
    ) -> None:
        self.peer = peer
        self._me = me
        self._layout = layout
        self._caller = Caller(client, self._told)
        self._pool = pool
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-to-{peer.worker_id}")
        self._channel: SendChannel | None = None
        self._pushes: asyncio.Queue[_Push] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.broken = False
        self.pushes_in_flight = 0

    @classmethod
    async def open(
        cls,
        me: WorkerRef,
        peer: WorkerRef,
        secret: bytes,
        layout: KvLayout,
        transports: Sequence[SendTransport],
        pool: PoolView,
        *,
        connect_s: float,
        lease_s: float,
        heartbeat_s: float,
    ) -> SendingPair:
        """Connect to a decode worker over the first transport that it takes.

        Raises WorkerLostError, IncompatiblePeerError or KvTransferError.
        """
        client = await WireClient.connect(peer.address, secret, connect_s)
        pair = cls(me, peer, layout, client, pool, lease_s=lease_s, heartbeat_s=heartbeat_s)
        pair._tasks.append(asyncio.create_task(pair._caller.run()))

        async def ask(build: Callable[[int], PairOpen]) -> PairOpened:
            return expect(await pair._caller.ask(build, connect_s), PairOpened)

        try:
            pair._channel = await offer(ask, me, peer, layout, transports, pool, pair._thread, lease_s)
        except BaseException:
            await pair.close()
            raise
        pair._tasks += [asyncio.create_task(pair._pump()), asyncio.create_task(pair._ping())]
        return pair

    def push(self, step: StepSignal, parts: Sequence[PushPart]) -> asyncio.Future[None]:
        """Announce a push and queue it; the future ends when its last byte has left, or with KvTransferError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(_observe)
        if self.broken:
            done.set_exception(self._lost())
            return done
        segments = tuple(
            PushSegment(part.transfer.ticket.ticket_id, part.transfer.ticket.transfer_id, part.start, part.num_tokens)
            for part in parts
        )
        announce = self._caller.ask(lambda call_id: PushAnnounce(call_id, segments), self._lease_s)
        self.pushes_in_flight += 1
        self._pushes.put_nowait(_Push(step, parts, asyncio.create_task(announce), done))
        return done

    async def commit(self, transfer: OutgoingTransfer) -> None:
        """Close a transfer after its last push. Returns when decode has checked it; raises TandemError otherwise."""
        if transfer.refused:
            raise KvTransferError("the decode worker no longer holds the ticket")
        answer = await self._caller.ask(
            lambda call_id: PushCommit(
                call_id,
                transfer.ticket.ticket_id,
                transfer.ticket.transfer_id,
                transfer.sent_tokens,
                self._layout.num_layers,
                self._layout,
                transfer.fingerprints.digest(),
            ),
            self._lease_s,
        )
        expect(answer, Committed)

    def abort(self, transfer: OutgoingTransfer) -> None:
        """Tell decode that no more will come. A broken pair has told it already by being broken."""
        try:
            self._caller.send(TransferAbort(transfer.ticket.ticket_id, transfer.ticket.transfer_id))
        except TandemError:
            log.debug("%s is gone, nothing to abort", self.peer.worker_id)

    async def close(self) -> None:
        """Fail what is under way and give everything back. Idempotent."""
        self.broken = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._caller.close()
        while not self._pushes.empty():
            self._fail(self._pushes.get_nowait())
        await asyncio.to_thread(self._thread.shutdown)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _pump(self) -> None:
        """Send pushes in the order in which they were announced."""
        while True:
            push = await self._pushes.get()
            try:
                posted = expect(await push.posted, PushPosted)
                for part in push.parts:
                    part.transfer.refused |= part.transfer.ticket.ticket_id in posted.refused_ticket_ids
                await asyncio.get_running_loop().run_in_executor(self._thread, self._send_layers, push)
            except (TransportError, TandemError) as error:
                log.warning("KV channel to %s broke: %s", self.peer.worker_id, error)
                self.broken = True
                self._fail(push)
                while not self._pushes.empty():
                    self._fail(self._pushes.get_nowait())
                self._caller.close()
                return
            except asyncio.CancelledError:
                self._fail(push)
                raise
            self.pushes_in_flight -= 1
            push.done.set_result(None)

    def _send_layers(self, push: _Push) -> None:
        """In the pair's thread."""
        assert self._channel is not None
        parts = [part for part in push.parts if not part.transfer.refused]
        if not parts:
            return
        cuts = [cut(part.block_table, self._layout.block_size, part.start, part.num_tokens) for part in parts]
        slots = Slots(slot_runs(itertools.chain(*cuts)))
        for layers in layer_groups(self._layout.num_layers, len(slots) * self._layout.token_bytes):
            # What goes last waits for the whole step: sending takes the interpreter from the engine, and nobody waits for
            # KV before the first token is out.
            is_last = layers.stop == self._layout.num_layers
            push.step.wait_for(layers.stop if is_last else layers[-1], self._lease_s)
            self._channel.send(layers, slots)
            for part, pieces in zip(parts, cuts, strict=True):
                sent = self._pool.bytes[layers.start : layers.stop]
                part.transfer.fingerprints.update(sent, self._pool.row_bytes, pieces)
        self._channel.flush()
        for part in parts:
            part.transfer.sent_tokens += part.num_tokens

    def _told(self, message: object) -> None:
        """Decode speaks without being asked: load reports, which are for routers, and the end of the channel."""
        if isinstance(message, PairClosed):
            log.warning("%s closed the KV channel: %s", self.peer.worker_id, message.reason)
            self.broken = True

    async def _ping(self) -> None:
        while not self.broken:
            try:
                self._caller.send(Ping())
            except TandemError:
                self.broken = True
                return
            await asyncio.sleep(self._heartbeat_s)

    def _fail(self, push: _Push) -> None:
        push.posted.cancel()
        self.pushes_in_flight -= 1
        if not push.done.done():
            push.done.set_exception(self._lost())

    def _lost(self) -> KvTransferError:
        return KvTransferError(f"the KV channel to {self.peer.worker_id} is lost")


def _observe(done: asyncio.Future[None]) -> None:
    """Mark a failure as seen: whoever awaits the push learns of it, but a cancelled request awaits nothing."""
    if not done.cancelled():
        done.exception()
