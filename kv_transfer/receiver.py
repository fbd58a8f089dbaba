"""Decode's end of the handoff: one ReceivingPair per prefill worker that is sending.

Announcements, pushes and commits of one prefill worker are handled strictly in the order in which it sent them: one pump
task and one thread per pair. A commit therefore meets a transfer whose pushes have all ended.

Who owns what: blocks and ticket states belong to the decode worker's ledger (`TransferBooks`); this part only tells it when
a push begins and ends. A push that began always ends, also when its ticket was cancelled meanwhile: the bytes still arrive
into the quarantined blocks. When the channel breaks, every push on it ends as failed, and the pair is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.fingerprint import BlockFingerprints, first_difference
from kv_transfer.plan import cut, layer_groups, slot_runs
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.rendezvous import check
from kv_transfer.transport import ReceiveChannel, ReceiveTransport, TransportError
from protocol.errors import KvTransferError, TandemError, TransportUnavailableError
from protocol.messages import (
    Committed,
    Failed,
    KvLayout,
    PairClosed,
    PairOpen,
    PairOpened,
    PushAnnounce,
    PushCommit,
    PushPosted,
    PushSegment,
    WorkerRef,
)

log = logging.getLogger(__name__)


class Destination(Protocol):
    """Where a transfer goes, as far as this part needs to know."""

    @property
    def block_table(self) -> Sequence[int]: ...

    @property
    def fingerprints(self) -> BlockFingerprints: ...


class TransferBooks(Protocol):
    """The ledger, seen from here (`decode_workers.ledger`)."""

    def begin_push(
        self, source: bytes, ticket_id: int, transfer_id: int, start: int, num_tokens: int
    ) -> Destination | None: ...

    def end_push(self, ticket_id: int, num_tokens: int, ok: bool) -> None: ...

    def fingerprints(self, ticket_id: int, transfer_id: int) -> bytes | None: ...

    def commit(self, ticket_id: int, transfer_id: int, num_tokens: int) -> bool: ...

    def abort_transfer(self, ticket_id: int, transfer_id: int) -> None: ...


@dataclass
class TransferStats:
    """Counts since the worker's start."""

    committed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class _Push:
    segments: tuple[PushSegment, ...]
    destinations: tuple[Destination, ...]


class ReceivingPair:
    """One prefill worker's channel. Lives until that worker is lost, opens a new pair, or the channel breaks."""

    def __init__(
        self,
        source: bytes,
        books: TransferBooks,
        layout: KvLayout,
        pool: PoolView,
        send: Callable[[object], None],
        stats: TransferStats,
    ) -> None:
        self._source = source
        self._books = books
        self._layout = layout
        self._pool = pool
        self._send = send
        self._stats = stats
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-receive")
        self._work: asyncio.Queue[_Push | PushCommit] = asyncio.Queue()
        self._pump_task: asyncio.Task[None] | None = None
        self._channel: ReceiveChannel | None = None
        self._closed = False

    def open(self, message: PairOpen, me: WorkerRef, transports: Sequence[ReceiveTransport], lease_s: float) -> None:
        """Start to connect; the answer goes out when our address is known. Refuses what does not fit."""
        try:
            transport = check(message, me, self._layout, transports)
        except TandemError as error:
            self._send(Failed.from_error(message.call_id, error))
            return
        self._pump_task = asyncio.create_task(self._pump(message, transport, lease_s))

    def announce(self, message: PushAnnounce) -> None:
        """Begin the pushes that the ledger allows and answer which it refuses."""
        begun: list[tuple[PushSegment, Destination]] = []
        refused: list[int] = []
        for segment in message.segments:
            destination = None
            if not self._closed:
                destination = self._books.begin_push(
                    self._source, segment.ticket_id, segment.transfer_id, segment.start, segment.num_tokens
                )
            if destination is None:
                refused.append(segment.ticket_id)
            else:
                begun.append((segment, destination))
        if begun:
            segments, destinations = zip(*begun, strict=True)
            self._work.put_nowait(_Push(segments, destinations))
        self._send(PushPosted(message.call_id, tuple(refused)))

    def commit(self, message: PushCommit) -> None:
        """Checked, in order, after the pushes that came before it."""
        if self._closed:
            self._send(Failed.from_error(message.call_id, KvTransferError("the KV channel is closed")))
        else:
            self._work.put_nowait(message)

    async def close(self) -> None:
        """End every push as failed and give the channel back. Idempotent."""
        if self._pump_task is not None:
            if not self._closed:  # a pump that is ending already must not be kept from it
                self._pump_task.cancel()
            self._closed = True
            await asyncio.wait((self._pump_task,))

    async def _pump(self, opening: PairOpen, transport: ReceiveTransport, lease_s: float) -> None:
        try:
            self._channel = await self._connect(opening, transport, lease_s)
            while True:
                work = await self._work.get()
                if isinstance(work, _Push):
                    await self._receive(work)
                else:
                    self._finish(work)
        except TransportUnavailableError as error:
            self._send(Failed.from_error(opening.call_id, error))
        except TransportError as error:
            log.warning("KV channel from %s broke: %s", opening.prefill.worker_id, error)
            self._send(PairClosed(str(error)))
        finally:
            self._closed = True
            self._fail_queued()
            # The thread may sit in a receive until the transport's deadline; its blocks stay quarantined until then.
            await asyncio.to_thread(self._thread.shutdown)
            if self._channel is not None:
                self._channel.close()

    async def _connect(self, opening: PairOpen, transport: ReceiveTransport, lease_s: float) -> ReceiveChannel:
        """Raises TransportUnavailableError if it failed before our answer went out, TransportError after that."""
        loop = asyncio.get_running_loop()
        answered = False

        def answer(address: bytes) -> None:
            nonlocal answered
            answered = True
            loop.call_soon_threadsafe(self._send, PairOpened(opening.call_id, address))

        def connect() -> ReceiveChannel:
            return transport.connect_receiver(opening.rendezvous, answer, self._pool, lease_s)

        try:
            return await loop.run_in_executor(self._thread, connect)
        except TransportError as error:
            if answered:
                raise
            raise TransportUnavailableError(str(error)) from None

    async def _receive(self, push: _Push) -> None:
        receiving = asyncio.get_running_loop().run_in_executor(self._thread, self._receive_layers, push)
        ok = False
        try:
            await asyncio.shield(receiving)
            ok = True
        except asyncio.CancelledError:
            # Only the thread's end makes the blocks safe to reuse, whatever became of this pair.
            await asyncio.wait((receiving,))
            receiving.exception()
            raise
        finally:
            for segment in push.segments:
                self._books.end_push(segment.ticket_id, segment.num_tokens, ok)
            self._stats.failed += not ok

    def _receive_layers(self, push: _Push) -> None:
        """In the pair's thread."""
        assert self._channel is not None
        cuts = [
            cut(destination.block_table, self._layout.block_size, segment.start, segment.num_tokens)
            for segment, destination in zip(push.segments, push.destinations, strict=True)
        ]
        slots = Slots(slot_runs(itertools.chain(*cuts)))
        self._pool.touch(slots)  # while prefill computes
        for layers in layer_groups(self._layout.num_layers, len(slots) * self._layout.token_bytes):
            self._channel.receive(layers, slots)
            for destination, pieces in zip(push.destinations, cuts, strict=True):
                arrived = self._pool.bytes[layers.start : layers.stop]
                destination.fingerprints.update(arrived, self._pool.row_bytes, pieces)

    def _finish(self, message: PushCommit) -> None:
        problem = self._problem(message)
        if problem is None and self._books.commit(message.ticket_id, message.transfer_id, message.num_tokens):
            self._stats.committed += 1
            self._send(Committed(message.call_id))
            return
        self._books.abort_transfer(message.ticket_id, message.transfer_id)
        self._stats.failed += 1
        error = KvTransferError(problem or "the transfer is incomplete or its ticket is gone")
        log.warning("refused a commit: %s", error.message)
        self._send(Failed.from_error(message.call_id, error))

    def _problem(self, message: PushCommit) -> str | None:
        if differences := self._layout.differences(message.layout):
            return f"KV caches differ: {'; '.join(differences)}"
        if message.num_layers != self._layout.num_layers:
            return f"{message.num_layers} of {self._layout.num_layers} layers were sent"
        arrived = self._books.fingerprints(message.ticket_id, message.transfer_id)
        if arrived is not None and (block := first_difference(arrived, message.fingerprints)) is not None:
            return f"the KV that arrived is not the KV that was sent, from block {block} on"
        return None

    def _fail_queued(self) -> None:
        while not self._work.empty():
            work = self._work.get_nowait()
            if isinstance(work, _Push):
                for segment in work.segments:
                    self._books.end_push(segment.ticket_id, segment.num_tokens, ok=False)
            else:
                self._send(Failed.from_error(work.call_id, KvTransferError("the KV channel broke")))
