"""A prompt's beginning that lies elsewhere comes into this worker's pool before the prompt is computed.

    pool holds ──► pinned, with fresh blocks behind ──► filled ──► cached, unpinned ──► the scheduler finds it
                                                          └── from the node's memory, a peer's pool, the node's disk

Prompts that lack nothing are computed meanwhile. From the end of a fetch until its prompt starts, its blocks are the newest of
the idle ones: where blocks are so few that they are evicted all the same, they are computed. Nothing is pinned while a prompt
that is due lacks blocks. Whatever goes wrong costs time only: each source has a deadline without progress, and one that has
failed is not waited for again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from engine.memory.block_table import BlockTables
from engine.memory.prefix_cache import Pin
from kv_transfer.fetching.borrower import Borrower
from kv_transfer.fetching.lenders import Lenders
from kv_transfer.tiers.overdue import Overdue
from prefill_workers.job import Job
from protocol.errors import TandemError
from protocol.messages.load import FAILED_LATE_S, MEMORY, PEER, Brought
from protocol.messages.prefill import FetchFrom
from protocol.messages.workers import WorkerLife
from worker.core import WorkerCore

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 4
"""Fetches of one worker. More would only share its link."""
_SHARE_BESIDE = 0.5
"""Share of the free blocks that a fetch may take while prompts wait for their turn, which may need blocks sooner."""
_LEFT_ALONE_S = 5.0
"""A peer from which nothing came is not asked again for so long, where that was found out late."""


class _NobodyWaitsError(Exception):
    """The prompts that blocks are fetched for were given up."""


@dataclass(eq=False, slots=True)
class _Coming:
    """Blocks that are being brought for one prompt."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    others: list[Job] = field(default_factory=list)
    """Other prompts that wait for them, or were given up while they did."""


class Fetching:
    """What one worker brings into its pool from others, before it computes a prompt. `computed_s` says in how many seconds so
    many more tokens would be computed, those that are queued before them among it; 0 if that is not known. `num_queued` says
    how many prompts are, and `growth` how many blocks a fetch that shares these cached ones leaves to the worker's streams. It
    is None while one of them waits for some: then none may be taken.
    """

    def __init__(
        self,
        core: WorkerCore,
        computed_s: Callable[[int], float],
        num_queued: Callable[[], int],
        growth: Callable[[Sequence[bytes]], int | None],
    ) -> None:
        rank, lease_s = core.rank, core.config.limits.lease_s
        self._me = core.me
        self._cache = core.cache
        self._tables = BlockTables(core.cache, core.block_size, core.window)
        self._block_size = core.block_size
        self._lease_s = lease_s
        self._computed_s = computed_s
        self._num_queued = num_queued
        self._growth = growth
        self._reader = None if core.tiers is None else core.tiers.reader
        self._spawn = core.spawn
        self._on_change = core.changed
        self._coming: dict[bytes, _Coming] = {}
        """By the first block that is being brought."""
        self._failed_at: dict[WorkerLife, float] = {}
        """When a fetch from a peer has failed last."""
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._lenders = Lenders(rank.secret, rank.config.limits)
        self._borrower = Borrower(rank.me, core.block_size, self._lenders, lease_s, core.ids)
        core.books.add(self._borrower)
        self.failed = 0
        """Fetches that brought nothing, since start."""

    def retire_lost(self) -> None:
        """Give back what lost connections hold."""
        self._lenders.retire_lost()

    async def close(self) -> None:
        """End everything that is under way. Called once."""
        await self._lenders.close()

    async def bring(self, job: Job) -> None:
        """Fill the pool with as much of a prompt's beginning as can be had, and note it in the prompt. Never fails.

        The router may have chosen a peer that holds more of it than this worker. Of several prompts that lack the same block,
        one brings it and the others wait for that.
        """
        wanted, prompt = job.message.fetch, job.prompt
        if wanted is None and self._reader is None:
            return
        keys = prompt.usable_keys(self._block_size)
        if self._tables.match(keys) == len(keys):
            return
        began, before = time.monotonic(), prompt.brought.seconds
        await self._wait_for_others(job, keys)
        if (held := self._cache.match(keys)) < len(keys):
            lacking, coming = keys[held], _Coming()
            self._coming[lacking] = coming
            try:
                for source in self._sources(wanted):
                    await self._take(source, job, keys, coming)
            finally:
                coming.done.set()
                if self._coming.get(lacking) is coming:
                    del self._coming[lacking]
        in_vain_s = time.monotonic() - began - (prompt.brought.seconds - before)
        prompt.brought += Brought(seconds=max(0.0, in_vain_s))

    async def _wait_for_others(self, job: Job, keys: Sequence[bytes]) -> None:
        """While another prompt brings the first block that lacks, for a lease at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s):
                while (held := self._cache.match(keys)) < len(keys) and (other := self._coming.get(keys[held])) is not None:
                    other.others.append(job)
                    try:
                        await other.done.wait()
                    finally:
                        other.others.remove(job)

    def _sources(self, wanted: FetchFrom | None) -> Iterator[str | FetchFrom]:
        """Names of tiers and the peer, the faster first: a peer's pool is slower than the node's memory, and faster than its
        disk. What does not answer, or does not pay, is left out.
        """
        names = () if self._reader is None else self._reader.names
        everything = [*(name for name in names if name == MEMORY), wanted, *(name for name in names if name != MEMORY)]
        return (source for source in everything if source is not None and self._may_take(source))

    async def _take(self, source: str | FetchFrom, job: Job, keys: Sequence[bytes], coming: _Coming) -> None:
        """Take what one source has beyond the blocks that are held."""
        held = self._cache.match(keys)
        end = await self._end(source, keys, held) if held < len(keys) else held
        if end <= held:
            return
        async with self._turn((end - held) * self._block_size) as has_turn:
            began, held = time.monotonic(), self._cache.match(keys)  # meanwhile some may have been evicted, or computed
            if not has_turn or end <= held or not self._is_wanted(job, coming) or not self._may_take(source):
                return
            most, growth = _SHARE_BESIDE if self._num_queued() else 1.0, self._growth(keys[:held])
            if growth is None:
                return
            pin = self._cache.pin("fetched", end, keys[:held], began + 2 * self._lease_s, most=most, spare=growth)
            if pin is None:
                return
            blocks = held
            try:
                blocks = await self._fill(source, keys[:end], pin, held, lambda: self._goes_on(job, coming, pin))
            except Overdue as overdue:
                self._spawn(self._unpin_when_done(pin, keys[:held], overdue.reading))
                return
            finally:
                if self._cache.is_current(pin):
                    self._cache.insert(keys[:blocks], pin.table)
            self._cache.unpin(pin, keys[:blocks])
            self._on_change()
        name = source if isinstance(source, str) else PEER
        job.prompt.brought += Brought.of(name, (blocks - held) * self._block_size, time.monotonic() - began)

    @asynccontextmanager
    async def _turn(self, num_tokens: int) -> AsyncIterator[bool]:
        """Wait for a turn until so many tokens would be computed, and a lease at most. Yields whether there is one."""
        try:
            async with asyncio.timeout(min(self._lease_s, self._computed_s(num_tokens) or self._lease_s)):
                await self._turns.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._turns.release()

    def _may_take(self, source: str | FetchFrom) -> bool:
        """Whether a source answers, and pays, as far as is known."""
        if isinstance(source, str):
            assert self._reader is not None, "only a tier that there is has a name"
            return self._reader.pays(source)
        peer = source.worker
        ours = peer.computation == self._me.computation and peer.life != self._me.life
        return ours and self._failed_at.get(peer.life, -math.inf) < time.monotonic() - _LEFT_ALONE_S

    async def _end(self, source: str | FetchFrom, keys: Sequence[bytes], held: int) -> int:
        """How many leading blocks this source and the pool probably have together."""
        if isinstance(source, FetchFrom):
            return min(len(keys), source.num_tokens // self._block_size)
        assert self._reader is not None, "only a tier that there is has a name"
        return held + await self._reader.match(source, keys[held:])

    async def _fill(
        self, source: str | FetchFrom, keys: Sequence[bytes], pin: Pin, held: int, on_progress: Callable[[], None]
    ) -> int:
        """Fill all but the first `held` blocks of a pin. Returns how many leading ones hold what they should."""
        if isinstance(source, str):
            assert self._reader is not None, "only a tier that there is has a name"
            return held + await self._reader.read(source, keys[held:], pin.table[held:])
        peer, began = source.worker, time.monotonic()
        try:
            return await self._borrower.fetch(peer, keys, pin.table, held, on_progress)
        except _NobodyWaitsError:
            return held
        except TandemError as error:
            self.failed += 1
            if (now := time.monotonic()) - began > FAILED_LATE_S:
                self._failed_at = {life: at for life, at in self._failed_at.items() if at > now - _LEFT_ALONE_S}
                self._failed_at[peer.life] = now
            log.info("nothing was fetched from %s: %s", peer.worker_id, error.message)
            return held

    def _is_wanted(self, job: Job, coming: _Coming) -> bool:
        """Whether a prompt still waits for what is being brought."""
        return not all(each.stopped for each in (job, *coming.others))

    def _goes_on(self, job: Job, coming: _Coming, pin: Pin) -> None:
        """Keep a pin while its blocks come. Raises _NobodyWaitsError if nobody wants them any more."""
        if not self._is_wanted(job, coming):
            raise _NobodyWaitsError
        pin.deadline = time.monotonic() + 2 * self._lease_s

    async def _unpin_when_done(self, pin: Pin, keys: Sequence[bytes], reading: asyncio.Future[int]) -> None:
        """A tier hangs in the middle of a read: its blocks are nobody else's until it has let go of them."""
        await asyncio.wait((reading,))
        self._cache.unpin(pin, keys)
        self._on_change()
