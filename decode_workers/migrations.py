"""Streams that leave for another decode worker while they are decoded.

    Migrate ──► WAITING for its turn ──► SENDING full blocks, decode goes on ──► PAUSED: the rest ──► committed ──► Migrated
                     └────────────────────────┴── failed: the stream goes on here ──┘

One stream at a time sends its full blocks, in pieces, and none of these goes while another stream is paused: its rest waits
for one piece at most. From its first piece on a stream is pinned: its blocks stay its own until nothing reads them any more,
whatever becomes of its ticket, and it is not preempted. A stream that ends or is released meanwhile is left alone after the
push under way.

Who frees: the ledger. What has left is released here at once; the target's ticket is the router's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler, Stream
from decode_workers.step_loop import StepLoop
from engine.gang import Gang
from engine.kv_pool import KVPool
from kv_transfer.lanes import LocalSendRank, SendRank
from kv_transfer.peers import DecodePeers
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import RemoteSendRank
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair
from kv_transfer.transport import SendTransport
from protocol.audit import SendRow
from protocol.errors import InvalidRequestError, KvTransferError, TandemError
from protocol.messages import Failed, Migrate, Migrated

log = logging.getLogger(__name__)

_PIECE_TOKENS = 128
"""Of one push of full blocks."""
_ROUNDS = 4
"""Each sends what was computed during the one before; after the last, a slow way to the target makes the pause longer."""
_STEP_OVER = 0
"""`kv_transfer.progress`: what is sent here was computed before."""


@dataclass(eq=False)
class _Leaving:
    """One migration, until its router has been answered."""

    router: bytes
    message: Migrate
    stream: Stream
    transfer: OutgoingTransfer
    pair: SendingPair | None = None


class Migrations:
    """All that leave one worker. `spawn` runs a task for as long as the worker; `on_change` is told when blocks came free."""

    def __init__(
        self,
        peers: DecodePeers,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        loop: StepLoop,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Any], object],
        on_change: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._ledger = ledger
        self._scheduler = scheduler
        self._loop = loop
        self._send = send
        self._spawn = spawn
        self._on_change = on_change
        self._leaving: dict[int, _Leaving] = {}
        """By ticket."""
        self._turn = asyncio.Lock()
        self._paused = 0
        self._nobody_paused = asyncio.Event()
        self._nobody_paused.set()

    def begin(self, router: bytes, message: Migrate) -> None:
        """Answered in any case: at once, or when the migration is over."""
        try:
            leaving = self._admitted(router, message)
        except TandemError as error:
            self._send(router, Failed.from_error(message.call_id, error))
            return
        self._leaving[message.ticket_id] = leaving
        self._spawn(self._leave(leaving))

    def rows(self) -> tuple[SendRow, ...]:
        """As an audit sees them."""
        tickets = [leaving.message.target for leaving in self._leaving.values()]
        return tuple(SendRow(t.ticket_id, t.transfer_id, t.worker.worker_id, t.worker.epoch) for t in tickets)

    def _admitted(self, router: bytes, message: Migrate) -> _Leaving:
        entry, stream, target = self._ledger.find(message.ticket_id), self._scheduler.find(message.ticket_id), message.target
        if entry is None or stream is None or entry.owner != router:
            raise KvTransferError("the ticket has no stream")
        if message.ticket_id in self._leaving:
            raise InvalidRequestError("the stream is leaving already")
        if not 0 <= target.held_tokens <= target.num_prompt_tokens < len(stream.token_ids) or target.block_size < 1:
            raise InvalidRequestError("the ticket was made for another stream")
        return _Leaving(router, message, stream, OutgoingTransfer(target))

    async def _leave(self, leaving: _Leaving) -> None:
        message, stream = leaving.message, leaving.stream
        answer: Migrated | Failed
        try:
            leaving.pair = await self._peers.pair(message.target.worker)
            await self._hand_over(leaving, leaving.pair)
            answer = Migrated(message.call_id, stream.token_ids[-1], stream.num_generated)
        except TandemError as error:
            log.info("a stream stays: %s", error.message)
            answer = Failed.from_error(message.call_id, error)
            if leaving.pair is not None:
                leaving.pair.abort(leaving.transfer)
        finally:
            del self._leaving[message.ticket_id]
        self._loop.flush()  # all that it has said goes before the news that it has left
        self._send(leaving.router, answer)

    async def _hand_over(self, leaving: _Leaving, pair: SendingPair) -> None:
        """Ends with the stream gone from here, or raises TandemError with nothing changed."""
        stream = leaving.stream
        with ExitStack() as pin:
            async with self._turn:
                self._check_there(leaving)
                pin.enter_context(self._pinned(stream))
                await self._send_full_blocks(leaving, pair)
            stream.paused = True
            await self._loop.boundary()
            with self._pause():
                await self._push(leaving, pair, stream.computed)
                self._check_there(leaving)
                await pair.commit(leaving.transfer)
            self._check_there(leaving)
            self._scheduler.remove(stream.ticket_id)
            self._ledger.keep(stream.ticket_id, stream.token_ids[: stream.computed])
            self._ledger.release(stream.ticket_id)

    async def _send_full_blocks(self, leaving: _Leaving, pair: SendingPair) -> None:
        block_size, stream = leaving.message.target.block_size, leaving.stream
        for _ in range(_ROUNDS):
            full = stream.computed // block_size * block_size
            if full <= leaving.transfer.sent_tokens:
                return
            while (sent := leaving.transfer.sent_tokens) < full:
                await self._nobody_paused.wait()
                await self._push(leaving, pair, min(full, sent + _PIECE_TOKENS))

    async def _push(self, leaving: _Leaving, pair: SendingPair, end: int) -> None:
        """Send the KV up to this token, and with it the tokens of which the target does not know."""
        self._check_there(leaving)
        transfer, stream = leaving.transfer, leaving.stream
        start = transfer.sent_tokens
        if start < end:
            added = tuple(stream.token_ids[max(start, transfer.ticket.num_prompt_tokens) : end])
            await pair.push(_STEP_OVER, [PushPart(transfer, tuple(stream.block_table), start, end - start, added)])
        if transfer.refused:
            raise KvTransferError(f"{pair.peer.worker_id} no longer holds the ticket, or has no room for more")

    def _check_there(self, leaving: _Leaving) -> None:
        """Raise KvTransferError unless the stream is still here with all its KV."""
        stream = leaving.stream
        if stream.ticket_id not in self._scheduler:
            raise KvTransferError("the stream has ended")
        if not stream.complete or stream.computed < leaving.message.target.num_prompt_tokens:
            raise KvTransferError("the stream was preempted: its KV is not there")

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """A client waits for what is sent now."""
        self._paused += 1
        self._nobody_paused.clear()
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                self._nobody_paused.set()

    @contextmanager
    def _pinned(self, stream: Stream) -> Iterator[None]:
        self._ledger.begin_send(stream.ticket_id)
        stream.pinned = True
        try:
            yield
        finally:
            stream.pinned = stream.paused = False
            self._ledger.end_send(stream.ticket_id)
            self._on_change()


def send_ranks(pool: KVPool, transports: Sequence[SendTransport], gang: Gang, lease_s: float) -> list[SendRank]:
    """Of streams that migrate: they send what was computed in earlier steps, so no step's progress is followed."""
    first = LocalSendRank(pool.layers(), pool.block_size, transports, StepProgress(pool.data.device), lease_s)
    return [first, *(RemoteSendRank(gang.asker(rank), first.transports) for rank in range(1, gang.size))]
