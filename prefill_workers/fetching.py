"""A prompt's beginning that lies elsewhere comes into this worker's pool before the prompt is computed.

    pool holds ──► pinned, with fresh blocks behind ──► filled ──► cached, unpinned ──► the scheduler finds it
                                                          └── from the node's memory, a peer's pool, the node's disk

Prompts that wait behind are computed meanwhile. From the end of a fetch until its prompt starts, its blocks are the newest of
the idle ones: where blocks are so few that they are evicted all the same, they are computed. So whoever waits for blocks never
waits for a prompt behind it. Whatever goes wrong costs time only, for at most as long as a fetch may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from engine.memory.prefix_cache import PrefixCache
from engine.ranks.first_rank import FirstRank
from kv_transfer.arrivals import Arrivals
from kv_transfer.fetching.borrower import Borrower
from kv_transfer.fetching.lender import Lender
from kv_transfer.fetching.lenders import Lenders
from kv_transfer.peers import DecodePeers
from kv_transfer.remote_lanes import receive_ranks
from kv_transfer.transport import ReceiveTransport
from prefill_workers.scheduler import Prompt
from protocol.cache.fetch import Fetch
from protocol.endpoint import Handler
from protocol.errors import TandemError
from protocol.messages import (
    MEMORY,
    PEER,
    Brought,
    FetchFrom,
    PairOpen,
    PushAnnounce,
    PushCommit,
    TransferAbort,
)

if TYPE_CHECKING:  # only where tiers are configured are they imported
    from kv_transfer.tiers.reader import TierReader

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""Fetches of one worker. More would only share its link."""


class Fetching:
    """What one prefill worker brings into its pool from others, and what it gives them out of its own.

    `send` takes a peer's wire identity and a message; `spawn` runs a task for as long as the worker. `handlers` answer
    messages, by type.
    """

    def __init__(
        self,
        rank: FirstRank,
        cache: PrefixCache,
        receiving: Sequence[ReceiveTransport],
        peers: DecodePeers,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        reader: TierReader | None,
    ) -> None:
        """`reader` reads the tiers of the node, if it has some."""
        runner, pool, lease_s = rank.runner, rank.runner.pool, rank.config.limits.lease_s
        self._me = rank.me
        self._cache = cache
        self._block_size = pool.block_size
        self._lease_s = lease_s
        self._reader = reader
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._lenders = Lenders(rank.secret, rank.config.limits)
        self._borrower = Borrower(rank.me, pool.block_size, self._lenders, lease_s)
        receivers = receive_ranks(pool.layers(), pool.block_size, receiving, rank.gang.askers(), lease_s)
        self._arrivals = Arrivals(
            rank.me, self._borrower, runner.layout(), runner.facts.vocab_size, pool.block_size, receivers, send
        )
        self.lender = Lender(cache, pool.block_size, peers, send, spawn, lease_s)
        self.handlers: dict[type[Any], Handler] = {
            Fetch: self.lender.ask,
            PairOpen: self._arrivals.open,
            PushAnnounce: self._arrivals.announce,
            PushCommit: self._arrivals.commit,
            TransferAbort: self._arrivals.abort,
        }
        self.failed = 0
        """Fetches that brought nothing, since start."""

    def peer_lost(self, peer: bytes) -> None:
        """Fail what this peer was sending."""
        self._arrivals.leave(peer)

    def retire_lost(self) -> None:
        """Give back what lost connections hold."""
        self._lenders.retire_lost()

    async def close(self) -> None:
        """End everything that is under way. Called once."""
        await self._lenders.close()
        await self._arrivals.close()

    async def bring(self, prompt: Prompt, wanted: FetchFrom | None) -> None:
        """Fill the pool with as much of a prompt's beginning as can be had, and note it in the prompt. Never fails.

        `wanted` is a peer that the router has chosen, since it may hold more of it than this worker.
        """
        if wanted is None and self._reader is None:
            return
        async with self._turns:
            keys = prompt.usable_keys(self._block_size)
            held = self._cache.match(keys)
            for name in (*self._tiers_before(wanted), PEER, *self._tiers_after(wanted)):
                if held < len(keys):
                    held = await self._take(name, prompt, keys, held, wanted)

    def _tiers_before(self, wanted: FetchFrom | None) -> Sequence[str]:
        """A peer's pool is slower than the node's memory, and faster than its disk."""
        return [] if self._reader is None else [name for name in self._reader.names if name == MEMORY or wanted is None]

    def _tiers_after(self, wanted: FetchFrom | None) -> Sequence[str]:
        return [] if self._reader is None else [name for name in self._reader.names if name != MEMORY and wanted is not None]

    async def _take(self, name: str, prompt: Prompt, keys: Sequence[bytes], held: int, wanted: FetchFrom | None) -> int:
        """Take what one source has beyond the blocks that are held. Returns how many leading blocks are in the pool then."""
        began = time.monotonic()
        end = await self._end(name, keys, held, wanted)
        held = self._cache.match(keys)  # meanwhile some may have been evicted, or computed
        if end <= held:
            return held
        pin = self._cache.pin("fetched", end, keys[:held], time.monotonic() + 2 * self._lease_s)
        if pin is None:
            return held
        blocks = held
        try:
            blocks = await self._fill(name, keys[:end], pin.table, held, wanted)
            self._cache.insert(keys[:blocks], pin.table)
        finally:
            self._cache.unpin(pin, keys[:blocks])
        if blocks > held:
            prompt.brought += Brought.of(name, (blocks - held) * self._block_size, time.monotonic() - began)
        return blocks

    async def _end(self, name: str, keys: Sequence[bytes], held: int, wanted: FetchFrom | None) -> int:
        """How many leading blocks this source and the pool probably have together; 0 if it is not to be asked."""
        if name != PEER:
            assert self._reader is not None, "only a tier that there is has a name"
            return held + await self._reader.match(name, keys[held:]) if self._reader.pays(name) else 0
        if wanted is None or wanted.worker.arithmetic != self._me.arithmetic or wanted.worker.life == self._me.life:
            return 0
        return min(len(keys), wanted.num_tokens // self._block_size)

    async def _fill(self, name: str, keys: Sequence[bytes], table: Sequence[int], held: int, wanted: FetchFrom | None) -> int:
        """Fill all but the first `held` blocks of a table. Returns how many leading ones hold what they should."""
        if name != PEER:
            assert self._reader is not None, "only a tier that there is has a name"
            return held + await self._reader.read(name, keys[held:], table[held:])
        assert wanted is not None, "a peer was chosen"
        try:
            return await self._borrower.fetch(wanted.worker, keys, table, held)
        except TandemError as error:
            self.failed += 1
            log.info("nothing was fetched from %s: %s", wanted.worker.worker_id, error.message)
            return held
