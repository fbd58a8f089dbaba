"""The lender's side of a fetch: cached blocks leave for another worker, pinned while they are read.

    Fetch ──► match ──► pinned under a lease ──► pushed in pieces ──► commit ──► Fetched
                 └── too little, too many at once: Failed     └── the borrower is lost, or gave up: Failed

A lease is renewed by each piece that has arrived. Who frees: `_lend`, when no push reads the blocks any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kv_transfer.peers import DecodePeers
from kv_transfer.pinning import Pinned, PinningCache
from kv_transfer.progress import STEP_OVER
from kv_transfer.sender import PIECE_TOKENS, OutgoingTransfer, PushPart
from protocol.cache.fetch import Fetch, Fetched
from protocol.errors import InvalidRequestError, KvTransferError, OverloadedError, TandemError
from protocol.messages.common import Failed

log = logging.getLogger(__name__)

MOST_LOANS = 16
"""Fetches that one worker serves at once."""
MOST_SHARE = 0.5
"""Share of the pool's free blocks that one loan may take: prompts and streams of the worker need some meanwhile. Of a
prefix that takes more, the first half is lent, or a half of that, and so on."""


class Lender:
    """Serves the fetches of one worker's cached blocks. `send` takes a peer's wire identity and a message; `spawn` runs a task
    for as long as the worker; `on_change` is called when blocks were unpinned. `growth` says how many blocks a loan that takes
    these cached ones leaves to the worker's own prompts and streams. It is None while one of them waits for some: then nothing
    is lent.
    """

    def __init__(
        self,
        cache: PinningCache,
        block_size: int,
        peers: DecodePeers,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[], None],
        lease_s: float,
        growth: Callable[[Sequence[bytes]], int | None],
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        self._peers = peers
        self._send = send
        self._spawn = spawn
        self._on_change = on_change
        self._lease_s = lease_s
        self._growth = growth
        self._loans = 0
        self.lent_tokens = 0
        """Tokens whose KV was sent and committed, since start."""
        self.lent_bytes = 0
        """Bytes of that KV."""

    def ask(self, peer: bytes, message: Fetch) -> None:
        """Take a Fetch. It is answered at once if it is refused, and otherwise when the KV is there."""
        try:
            num_blocks = self._checked(message)
            pinned = self._pinned(message, num_blocks)
            if pinned is None:
                raise OverloadedError("the pool has no blocks to spare", retry_after_s=1.0)
        except TandemError as error:
            self._send(peer, Failed.from_error(message.call_id, error))
            return
        self._loans += 1
        self._spawn(self._lend(peer, message, pinned))

    def _checked(self, message: Fetch) -> int:
        """The number of leading blocks that can be sent. Raises TandemError if there is nothing to send."""
        ticket = message.ticket
        if ticket.block_size != self._block_size or not 0 <= ticket.held_tokens < ticket.num_prompt_tokens:
            raise InvalidRequestError("the ticket was not made for blocks like these")
        if len(message.keys) * self._block_size != ticket.num_prompt_tokens or ticket.held_tokens % self._block_size:
            raise InvalidRequestError("the ticket was made for other blocks")
        if len(set(message.keys)) < len(message.keys):
            raise InvalidRequestError("a block is wanted twice")
        if self._loans >= MOST_LOANS:
            raise OverloadedError(f"{self._loans} workers fetch blocks here already", retry_after_s=1.0)
        num_blocks = self._cache.match(message.keys)
        if num_blocks * self._block_size <= ticket.held_tokens:
            raise KvTransferError("the blocks are not cached here any more")
        return num_blocks

    def _pinned(self, message: Fetch, num_blocks: int) -> Pinned | None:
        """Pin as many of the leading blocks as one loan may take. None if these are none that the borrower lacks."""
        while num_blocks * self._block_size > message.ticket.held_tokens:
            keys = message.keys[:num_blocks]
            growth = self._growth(keys)
            if growth is None:
                return None
            pinned = self._cache.pin("lent", num_blocks, keys, self._deadline(), most=MOST_SHARE, spare=growth)
            if pinned is not None:
                return pinned
            num_blocks //= 2
        return None

    async def _lend(self, peer: bytes, message: Fetch, pinned: Pinned) -> None:
        answer: Fetched | Failed
        try:
            answer = Fetched(message.call_id, await self._send_kv(message, pinned))
        except TandemError as error:
            log.info("blocks were not lent: %s", error.message)
            answer = Failed.from_error(message.call_id, error)
        finally:
            self._loans -= 1
            self._cache.unpin(pinned, message.keys[: len(pinned.table)])
            self._on_change()
        self._send(peer, answer)

    async def _send_kv(self, message: Fetch, pinned: Pinned) -> int:
        """Send the blocks, piece by piece, for as long as the worker's own prompts and streams don't need them.

        Returns how many of the prompt's tokens the borrower has, once it has committed them, or raises TandemError; either way
        nothing reads the blocks any more.
        """
        transfer, end = OutgoingTransfer(message.ticket), len(pinned.table) * self._block_size
        pair = await self._peers.pair(message.ticket.worker)
        while (start := transfer.sent_tokens) < end:
            if start > message.ticket.sent_from and (self._cache.lacking or self._growth(()) is None):
                break
            size = min(PIECE_TOKENS, end - start)
            await pair.push(STEP_OVER, [PushPart(transfer, pinned.table, start, size)])
            if transfer.refused:
                raise KvTransferError(f"{pair.peer.worker_id} no longer waits for the blocks")
            pinned.deadline = self._deadline()
        await pair.commit(transfer)
        self.lent_tokens += transfer.sent_tokens - message.ticket.held_tokens
        self.lent_bytes += (transfer.sent_tokens - message.ticket.sent_from) * pair.token_bytes
        return transfer.sent_tokens

    def _deadline(self) -> float:
        return time.monotonic() + self._lease_s
