"""Streams that are sent to another decode worker while they are decoded, to leave for it or to have a copy there.

    Migrate ──► WAITING for its turn ──► SENDING full blocks, decode goes on ──► PAUSED: the rest ──► committed ──► Migrated
                     └────────────────────────┴── failed, or late: the stream goes on here ──┘
    Copy ─────► WAITING for its turn ──► SENDING, decode goes on ──► committed ──► Copied

One stream at a time sends its full blocks, in pieces, and none of these goes while another stream is paused: its rest waits
for one piece at most. A stream that has not sent its full blocks within four leases is late. Its router may ask again; after
six it would give the stream up for lost. From its first piece on a stream is pinned: its blocks stay its own until nothing
reads them any more, whatever becomes of its ticket, and it is not preempted. A stream that ends or is released meanwhile is
left alone after the push under way.

Who frees: the ledger. What has left is released here at once; the target's ticket is the router's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.step_loop import StepLoop
from decode_workers.stream import Stream
from kv_transfer.peers import DecodePeers
from kv_transfer.progress import STEP_OVER
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair
from protocol.audit import SendRow
from protocol.errors import InvalidRequestError, KvTransferError, TandemError
from protocol.messages.common import Failed
from protocol.messages.decode import Copied, Copy, Migrate, Migrated

log = logging.getLogger(__name__)

_PIECE_TOKENS = 128
"""Tokens of one push of full blocks, at most."""
_FULL_BLOCKS_LEASES = 4
"""Number of leases in which a stream must have its turn and send its full blocks. The rest and the commit may take two more."""
_ROUNDS = 4
"""Number of rounds before the pause. Each sends what was computed during the one before, so a slow way makes the pause longer.
"""


@dataclass(eq=False)
class _Sending:
    """One migration or copy, until its router has been answered."""

    router: bytes
    message: Migrate | Copy
    stream: Stream
    transfer: OutgoingTransfer
    deadline: float
    """Time on the loop's clock at which its full blocks must have been sent."""
    pair: SendingPair | None = None


class Migrations:
    """All streams that one worker sends to others, to leave for them or to have a copy there.

    `spawn` runs a task for as long as the worker. `on_change` is called when blocks may have come free.
    """

    def __init__(
        self,
        peers: DecodePeers,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        loop: StepLoop,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
        lease_s: float,
    ) -> None:
        self._peers = peers
        self._ledger = ledger
        self._scheduler = scheduler
        self._loop = loop
        self._send = send
        self._spawn = spawn
        self._on_change = on_change
        self._lease_s = lease_s
        self._sending: dict[int, _Sending] = {}
        """By ticket."""
        self._turn = asyncio.Lock()
        self._paused = 0
        self._nobody_paused = asyncio.Event()
        self._nobody_paused.set()

    def begin(self, router: bytes, message: Migrate | Copy) -> None:
        """Take a router's Migrate or Copy. It is answered at once if it is refused, and otherwise when it is over."""
        try:
            sending = self._admitted(router, message)
        except TandemError as error:
            self._send(router, Failed.from_error(message.call_id, error))
            return
        self._sending[message.ticket_id] = sending
        self._scheduler.attached.want(message.ticket_id, message.target.sent_from)
        self._spawn(self._serve(sending))

    def rows(self) -> tuple[SendRow, ...]:
        """Every migration and copy as an audit sees it."""
        tickets = [sending.message.target for sending in self._sending.values()]
        return tuple(SendRow(t.ticket_id, t.transfer_id, t.worker.worker_id, t.worker.epoch) for t in tickets)

    def _admitted(self, router: bytes, message: Migrate | Copy) -> _Sending:
        entry, stream, target = self._ledger.find(message.ticket_id), self._scheduler.find(message.ticket_id), message.target
        if entry is None or stream is None or entry.owner != router:
            raise KvTransferError("the ticket has no stream")
        if message.ticket_id in self._sending:
            raise InvalidRequestError("the stream is being sent already")
        known = target.num_prompt_tokens
        if not 0 <= target.held_tokens <= target.sent_from <= known < len(stream.token_ids) or target.block_size < 1:
            raise InvalidRequestError("the ticket was made for another stream")
        deadline = asyncio.get_running_loop().time() + _FULL_BLOCKS_LEASES * self._lease_s
        return _Sending(router, message, stream, OutgoingTransfer(target, entry.mixed), deadline)

    async def _serve(self, sending: _Sending) -> None:
        message, stream = sending.message, sending.stream
        answer: Migrated | Copied | Failed
        try:
            sending.pair = await self._peers.pair(message.target.worker)
            if isinstance(message, Copy):
                await self._copy(sending, sending.pair)
                answer = Copied(message.call_id)
            else:
                await self._hand_over(sending, sending.pair)
                answer = Migrated(message.call_id, stream.token_ids[-1], stream.num_generated)
        except TandemError as error:
            log.info("a stream was not sent: %s", error.message)
            answer = Failed.from_error(message.call_id, error)
            if sending.pair is not None:
                sending.pair.abort(sending.transfer)
        finally:
            del self._sending[message.ticket_id]
            self._scheduler.attached.want(message.ticket_id, None)
            self._on_change()  # what the stream no longer sees may be given up now
        self._loop.flush()  # all that it has said goes before the news that it has left
        self._send(sending.router, answer)

    async def _copy(self, sending: _Sending, pair: SendingPair) -> None:
        """Ends with the KV at the target, or raises TandemError; the stream goes on here."""
        async with self._in_turn(sending):
            self._check_there(sending)
            with self._pinned(sending.stream):
                await self._push_up_to(sending, pair, sending.message.target.num_prompt_tokens)
        await pair.commit(sending.transfer)

    async def _hand_over(self, sending: _Sending, pair: SendingPair) -> None:
        """Ends with the stream gone from here, or raises TandemError with nothing changed."""
        stream = sending.stream
        with ExitStack() as pin:
            async with self._in_turn(sending):
                self._check_there(sending)
                pin.enter_context(self._pinned(stream))
                await self._send_full_blocks(sending, pair)
            stream.paused = True
            await self._loop.boundary()
            with self._pause():
                await self._push(sending, pair, stream.computed)
                self._check_there(sending)
                await pair.commit(sending.transfer)
            self._check_there(sending)
            self._scheduler.remove(stream.ticket_id)
            self._scheduler.attached.keep(stream.ticket_id, stream.token_ids, stream.computed)
            self._ledger.release(stream.ticket_id)

    async def _send_full_blocks(self, sending: _Sending, pair: SendingPair) -> None:
        block_size, stream = sending.message.target.block_size, sending.stream
        for _ in range(_ROUNDS):
            full = stream.computed // block_size * block_size
            if full <= sending.transfer.sent_tokens:
                return
            await self._push_up_to(sending, pair, full)

    async def _push_up_to(self, sending: _Sending, pair: SendingPair, end: int) -> None:
        """In pieces, so that a paused stream waits for one of them at most."""
        while (sent := sending.transfer.sent_tokens) < end:
            await self._in_time(sending, self._nobody_paused.wait)
            await self._push(sending, pair, min(end, sent + _PIECE_TOKENS))

    async def _push(self, sending: _Sending, pair: SendingPair, end: int) -> None:
        """Send the KV up to this token, and with it the tokens of which the target does not know."""
        self._check_there(sending)
        transfer, stream = sending.transfer, sending.stream
        start = transfer.sent_tokens
        if start < self._scheduler.attached.begins_at(stream.ticket_id):
            raise KvTransferError("the stream no longer has what the target waits for")
        if start < end:
            added = tuple(stream.token_ids[max(start, transfer.ticket.num_prompt_tokens) : end])
            await pair.push(STEP_OVER, [PushPart(transfer, tuple(stream.block_table), start, end - start, added)])
        if transfer.refused:
            raise KvTransferError(f"{pair.peer.worker_id} no longer holds the ticket, or has no room for more")

    def _check_there(self, sending: _Sending) -> None:
        """Raise KvTransferError unless the stream is still here with all its KV."""
        stream = sending.stream
        if stream.ticket_id not in self._scheduler:
            raise KvTransferError("the stream has ended")
        if not stream.complete or stream.computed < sending.message.target.num_prompt_tokens:
            raise KvTransferError("the stream was preempted: its KV is not there")

    @asynccontextmanager
    async def _in_turn(self, sending: _Sending) -> AsyncIterator[None]:
        """Full blocks of one stream alone are sent inside. Raises KvTransferError if the others take too long."""
        await self._in_time(sending, self._turn.acquire)
        try:
            yield
        finally:
            self._turn.release()

    async def _in_time(self, sending: _Sending, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait until full blocks may be sent. Raises KvTransferError if it is too late for them."""
        late = KvTransferError("sending the stream, and others before it, takes too long")
        if asyncio.get_running_loop().time() >= sending.deadline:
            raise late
        try:
            async with asyncio.timeout_at(sending.deadline):
                await wait()
        except TimeoutError:
            raise late from None

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
        self._scheduler.attached.begin_send(stream.ticket_id)
        stream.pinned = True
        try:
            yield
        finally:
            stream.pinned = stream.paused = False
            self._scheduler.attached.end_send(stream.ticket_id)
            self._on_change()
