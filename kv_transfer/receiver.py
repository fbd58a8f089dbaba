"""Decode's end of the handoff: one ReceivingPair per worker that is sending: prefill, or decode whose streams migrate.

    lane, lane … all connected ──► push ──► push ──► commit ──► …

The pushes of one sender are received strictly in the order of their announcements: one pump task per pair and one thread
per lane. A commit is handled as soon as the pushes of its own transfer have ended: the next ones are announced already, and
go on for as long as prefill computes them.

Who owns what: blocks and ticket states belong to the decode worker's ledger (`TransferBooks`); this part only tells it when
a push begins and ends. A push that began always ends, also when its ticket was cancelled meanwhile: the bytes still arrive
into the quarantined blocks. When the channel breaks, every push on it ends as failed, and the pair is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.fingerprints.pushes import first_difference
from kv_transfer.lanes import ReceiveLane, ReceiveRank
from kv_transfer.rendezvous import check, check_transport
from kv_transfer.transport import TransportError
from protocol.errors import KvTransferError, TandemError, first_line
from protocol.gang import HeadMove, TokenSpan
from protocol.messages.common import Failed
from protocol.messages.handoff import (
    Committed,
    PairClosed,
    PairOpen,
    PairOpened,
    PushAnnounce,
    PushCommit,
    PushPosted,
    PushSegment,
)
from protocol.messages.workers import KvLayout, WorkerRef

log = logging.getLogger(__name__)


class Destination(Protocol):
    """A ticket, as far as receiving needs to know it."""

    @property
    def block_table(self) -> Sequence[int]:
        """Blocks of this worker's pool that the transfer fills, in order."""

    mixed: bool
    """Some of it was computed by another arithmetic than this worker's. Set when a push begins."""

    def arrived(self, lane: int, digests: bytes) -> None:
        """Record the fingerprints of what a push has brought on this lane."""


class TransferBooks(Protocol):
    """The decode worker's ledger, as far as receiving uses it (`decode_workers.ledger`)."""

    def begin_push(
        self, source: bytes, ticket_id: int, transfer_id: int, start: int, num_tokens: int, added: tuple[int, ...]
    ) -> Destination | None:
        """Open a push of tokens [start, start + num_tokens). Returns None to refuse it."""

    def end_push(self, ticket_id: int, num_tokens: int, ok: bool) -> None:
        """End a push. If it failed, its ticket is aborted."""

    def fingerprints(self, ticket_id: int, transfer_id: int) -> Mapping[int, bytes] | None:
        """Fingerprints of what has arrived for this transfer, by lane. None if the ticket is gone."""

    def commit(self, ticket_id: int, transfer_id: int, num_tokens: int) -> bool:
        """Close a transfer whose fingerprints were checked. False if tokens are missing or the ticket is gone."""

    def abort_transfer(self, ticket_id: int, transfer_id: int) -> None:
        """Give up a transfer. Without effect if it was committed before."""


@dataclass
class TransferStats:
    """Counts since the worker's start."""

    committed: int = 0
    failed: int = 0


@dataclass(eq=False)
class _Push:
    segments: tuple[PushSegment, ...]
    destinations: tuple[Destination, ...]
    commits: list[PushCommit] = field(default_factory=list)
    """Commits of the transfers that end with this push."""


class ReceivingPair:
    """All lanes from one sender. It lives until that worker is lost, or until a lane breaks."""

    def __init__(
        self,
        source: bytes,
        me: WorkerRef,
        books: TransferBooks,
        layout: KvLayout,
        block_size: int,
        ranks: Sequence[ReceiveRank],
        send: Callable[[object], None],
        stats: TransferStats,
    ) -> None:
        self._source = source
        self._me = me
        self._books = books
        self._layout = layout
        self._block_size = block_size
        self._ranks = ranks
        self._send = send
        self._stats = stats
        self._foreign = False
        """The sender computes by another arithmetic than this worker."""
        self._moves: list[HeadMove] = []
        """One for each lane; known when the first is opened."""
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._lanes: dict[int, ReceiveLane] = {}
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """All lanes are, or one has failed to."""
        self._announced: asyncio.Queue[_Push] = asyncio.Queue()
        self._unfinished: list[_Push] = []
        """Announced, and not ended; in order."""
        self._life: asyncio.Task[None] | None = None
        self.closed = False

    def open(self, message: PairOpen) -> None:
        """Begin to connect one lane, and answer with this side's address as soon as that is known. Refuses a peer that does
        not fit.
        """
        try:
            moves = check(message, self._me, self._layout)
            if message.lane in self._connecting or self._moves not in ([], moves):
                raise KvTransferError(f"lane {message.lane} does not belong to this pair, or is open already")
            move = moves[message.lane]
            check_transport(message.transport, self._me, self._ranks[move.decode_rank])
        except TandemError as error:
            self._send(Failed.from_error(message.call_id, error))
            return
        self._moves = moves
        self._foreign = message.prefill.computation != self._me.computation
        self._connecting[message.lane] = asyncio.create_task(self._connect(message, move))
        self._life = self._life or asyncio.create_task(self._live(message.prefill.worker_id))

    def announce(self, message: PushAnnounce) -> None:
        """Begin the pushes that the ledger allows, and answer which of them it refuses."""
        if self.closed:
            self._send(self._closed_to(message.call_id))
            return
        begun: list[tuple[PushSegment, Destination]] = []
        refused: list[int] = []
        for number, segment in enumerate(message.segments):
            destination = self._books.begin_push(
                self._source, segment.ticket_id, segment.transfer_id, segment.start, segment.num_tokens, segment.added
            )
            if destination is None:
                refused.append(number)
            else:
                destination.mixed |= self._foreign or segment.mixed
                begun.append((segment, destination))
        if begun:
            segments, destinations = zip(*begun, strict=True)
            push = _Push(segments, destinations)
            self._unfinished.append(push)
            self._announced.put_nowait(push)
        self._send(PushPosted(message.call_id, tuple(refused)))

    def commit(self, message: PushCommit) -> None:
        """Compare fingerprints and commit a transfer, once its last push has ended."""
        if self.closed:
            self._send(self._closed_to(message.call_id))
            return
        for push in reversed(self._unfinished):
            if any(segment.ticket_id == message.ticket_id for segment in push.segments):
                push.commits.append(message)
                return
        self._finish(message)

    async def close(self) -> None:
        """End every push as failed and give the lanes back. Idempotent."""
        if self._life is not None:
            if not self.closed:  # one that is ending already must not be kept from it
                self._life.cancel()
            self.closed = True
            await asyncio.wait((self._life,))

    async def _connect(self, opening: PairOpen, move: HeadMove) -> None:
        """Bring one lane up, or say why it can't be: to the sender, or, if it has its answer, by the end of the pair."""
        answered = False

        def answer(address: bytes) -> None:
            nonlocal answered
            answered = True
            self._send(PairOpened(opening.call_id, address))

        try:
            rank = self._ranks[move.decode_rank]
            self._lanes[opening.lane] = await rank.accept(move, opening.transport, opening.rendezvous, answer)
        except Exception as error:  # whatever it is, the sender waits
            if not isinstance(error, TransportError | TandemError):
                log.exception("a lane from %s can't be connected", opening.prefill.worker_id)
            if not answered:
                del self._connecting[opening.lane]
                refusal = error if isinstance(error, TandemError) else KvTransferError(first_line(error))
                self._send(Failed.from_error(opening.call_id, refusal))
            elif not self._connected.done():
                self._connected.set_exception(error if isinstance(error, TransportError) else TransportError(str(error)))
        else:
            if len(self._lanes) == len(self._moves) and not self._connected.done():
                self._connected.set_result(None)

    async def _live(self, prefill_id: str) -> None:
        """From the first lane's opening to the end of all."""
        try:
            await self._connected
            while True:
                push = await self._announced.get()
                await self._receive(push)
                self._unfinished.remove(push)
                for message in push.commits:
                    self._finish(message)
        except TransportError as error:
            log.warning("KV channel from %s broke: %s", prefill_id, error)
            self._send(PairClosed(str(error)))
        except Exception as error:  # want of memory, for instance: the sender may have sent all that it had, and waits
            log.exception("receiving KV from %s failed", prefill_id)
            self._send(PairClosed(first_line(error)))
        finally:
            self.closed = True
            self._fail_unfinished()
            for task in self._connecting.values():
                task.cancel()
            await asyncio.gather(*self._connecting.values(), return_exceptions=True)
            await self._close_lanes()

    def _closed_to(self, call_id: int) -> Failed:
        return Failed.from_error(call_id, KvTransferError("the KV channel is closed"))

    async def _close_lanes(self) -> None:
        lanes, self._lanes = self._lanes, {}
        await asyncio.gather(*(lane.close() for lane in lanes.values()))

    async def _receive(self, push: _Push) -> None:
        spans = [
            TokenSpan(tuple(destination.block_table), segment.start, segment.num_tokens, self._block_size)
            for segment, destination in zip(push.segments, push.destinations, strict=True)
        ]
        lanes = sorted(self._lanes)
        receiving = [asyncio.create_task(self._lanes[lane].receive(spans)) for lane in lanes]
        ok = False
        try:
            await asyncio.wait(receiving)
            for lane, digests in zip(lanes, await asyncio.gather(*receiving), strict=True):
                for destination, digest in zip(push.destinations, digests, strict=True):
                    destination.arrived(lane, digest)
            ok = True
        except asyncio.CancelledError:
            # Only the threads' end makes the blocks safe to reuse, whatever became of this pair. A sender that is lost would be
            # waited for as long as a step may take.
            ending = [asyncio.create_task(self._close_lanes()), *receiving]
            await asyncio.wait(ending)
            for task in ending:
                task.exception()  # nobody is left to be told
            raise
        finally:
            for segment in push.segments:
                self._books.end_push(segment.ticket_id, segment.num_tokens, ok)
            self._stats.failed += not ok

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
        if len(message.fingerprints) != len(self._moves):
            return f"fingerprints of {len(message.fingerprints)} lanes of {len(self._moves)}"
        arrived = self._books.fingerprints(message.ticket_id, message.transfer_id)
        if arrived is None:
            return None  # the commit will find that the ticket is gone
        for lane, sent in enumerate(message.fingerprints):
            if (part := first_difference(arrived[lane], sent)) is not None:
                return f"the KV that arrived is not the KV that was sent, from part {part} on (lane {lane})"
        return None

    def _fail_unfinished(self) -> None:
        while not self._announced.empty():
            for segment in self._announced.get_nowait().segments:
                self._books.end_push(segment.ticket_id, segment.num_tokens, ok=False)
        for push in self._unfinished:
            for message in push.commits:
                self._send(Failed.from_error(message.call_id, KvTransferError("the KV channel broke")))
        self._unfinished.clear()
