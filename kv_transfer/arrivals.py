"""The workers that send KV here: one ReceivingPair each, from its first PairOpen until its sender is lost.

Owns the pairs. Who sends is a prefill worker, a decode worker whose streams migrate, or whoever has the blocks that this worker
fetches; here that is all the same. What arrives where is for the worker's books to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.lanes import ReceiveRank
from kv_transfer.receiver import ReceivingPair, TransferBooks, TransferStats
from protocol.errors import InvalidRequestError, KvTransferError, TandemError
from protocol.messages.common import Failed
from protocol.messages.handoff import PairOpen, PushAnnounce, PushCommit, TransferAbort
from protocol.messages.workers import KvLayout, WorkerRef


class Arrivals:
    """The pairs with all workers that send KV here. `send` takes a peer's wire identity and a message."""

    def __init__(
        self,
        me: WorkerRef,
        books: TransferBooks,
        layout: KvLayout,
        vocab_size: int,
        block_size: int,
        ranks: Sequence[ReceiveRank],
        send: Callable[[bytes, Any], None],
    ) -> None:
        self._me = me
        self._books = books
        self._layout = layout
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._ranks = ranks
        self._send = send
        self._pairs: dict[bytes, ReceivingPair] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.stats = TransferStats()

    def open(self, sender: bytes, message: PairOpen) -> None:
        """Connect one lane from this sender, whose pair begins with its first lane. Answers the sender."""
        pair = self._pairs.get(sender)
        if pair is None or pair.closed:
            self.leave(sender)
            pair = self._pairs[sender] = ReceivingPair(
                sender,
                self._me,
                self._books,
                self._layout,
                self._block_size,
                self._ranks,
                lambda answer: self._send(sender, answer),
                self.stats,
            )
        pair.open(message)

    def announce(self, sender: bytes, message: PushAnnounce) -> None:
        """Begin the pushes that a sender announces, or answer with Failed if it has no pair or sends token ids out of range."""
        try:
            pair = self._pair(sender)
            for segment in message.segments:
                if segment.added and not 0 <= min(segment.added) <= max(segment.added) < self._vocab_size:
                    raise InvalidRequestError(f"token ids must lie in [0, {self._vocab_size})")
        except TandemError as error:
            self._send(sender, Failed.from_error(message.call_id, error))
        else:
            pair.announce(message)

    def commit(self, sender: bytes, message: PushCommit) -> None:
        """Check and commit a transfer, or answer with Failed if its sender has no pair."""
        try:
            pair = self._pair(sender)
        except TandemError as error:
            self._send(sender, Failed.from_error(message.call_id, error))
        else:
            pair.commit(message)

    def abort(self, sender: bytes, message: TransferAbort) -> None:
        """Give up a transfer because its sender has."""
        self._books.abort_transfer(message.ticket_id, message.transfer_id)

    def leave(self, sender: bytes) -> None:
        """Close the pair of a sender that is gone or begins anew. Idempotent."""
        pair = self._pairs.pop(sender, None)
        if pair is not None:
            task = asyncio.create_task(pair.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all pairs. Called once, at the worker's end."""
        for sender in list(self._pairs):
            self.leave(sender)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _pair(self, sender: bytes) -> ReceivingPair:
        pair = self._pairs.get(sender)
        if pair is None:
            raise KvTransferError("there is no KV channel to send on")
        return pair
