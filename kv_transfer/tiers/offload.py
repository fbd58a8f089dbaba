"""What a worker's pool holds goes to the tiers once its prompt or stream is over, beside the steps.

    note(keys) ──► waiting, each key once ──► still cached: pinned, a few at a time ──► written by a thread ──► unpinned
                      └── too many wait, or evicted meanwhile: dropped, and computed again when somebody asks

So a block is written before the pool needs its place. The thread has a low priority, and the few blocks that are pinned are all
that a prompt may have to wait for. A disk that hangs keeps these, which an audit finds; nothing more is written then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kv_transfer.pinning import PinningCache
from kv_transfer.tiers.node_tiers import Tiers
from protocol.cache.shares import TierBlock
from protocol.errors import UnavailableError

_MOST_WAITING = 65_536
"""Blocks."""
_AT_ONCE = 8
"""Blocks that are pinned to be written."""
_LOOK_S = 1.0
"""From one count of what the tiers hold to the next."""
_WRITTEN_S = 60.0
"""A block that was written so lately is not looked for again: each turn of a chat leaves all blocks of those before. Unless so
many were written since that a tier may have evicted it.
"""


class Offload:
    """Writes one worker's blocks to its tiers. `on_change` is called when blocks were unpinned; `be_nice` lowers the priority
    of the thread that calls it.
    """

    def __init__(
        self, cache: PinningCache, tiers: Tiers, lease_s: float, on_change: Callable[[], None], be_nice: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._lease_s = lease_s
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, "kv-offload", be_nice)
        self._waiting: OrderedDict[bytes, str] = OrderedDict()
        """Salts by key, in the order in which they are to be written."""
        self._written: OrderedDict[bytes, float] = OrderedDict()
        """When blocks were written, the latest last."""
        self._noted = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held while blocks are pinned to be written."""

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to be written."""
        return len(self._waiting)

    def note(self, keys: Sequence[bytes], salt: str) -> None:
        """Note that a prompt with this salt is over whose blocks have these keys. The last one goes first, so that tiers that
        evict what was used longest ago keep beginnings.
        """
        long_ago = time.monotonic() - _WRITTEN_S
        for key in reversed(keys):
            if self._written.get(key, -math.inf) > long_ago:
                continue
            if len(self._waiting) >= _MOST_WAITING and key not in self._waiting:
                break
            self._waiting.pop(key, None)
            self._waiting[key] = salt
        if self._waiting:
            self._noted.set()

    async def forget(self) -> None:
        """Write nothing of what waits. Returns when nothing is being written any more.

        Raises UnavailableError if that takes longer than a lease.
        """
        self._waiting.clear()
        try:
            async with asyncio.timeout(self._lease_s), self._turn:
                self._waiting.clear()
                self._written.clear()
        except TimeoutError:
            raise UnavailableError("blocks are being written to a tier that does not answer") from None

    async def run(self) -> None:
        """Write what is noted until cancelled."""
        loop = asyncio.get_running_loop()
        looked = 0.0
        try:
            while True:
                if time.monotonic() - looked > _LOOK_S:
                    await loop.run_in_executor(self._thread, self._tiers.look)
                    looked = time.monotonic()
                async with self._turn:
                    wrote = await self._write_some(loop)
                if not wrote:
                    await self._rest()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _rest(self) -> None:
        """Return when something is noted, or when it is time to look again."""
        self._noted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._noted.wait()

    async def _write_some(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether there may be more to do at once."""
        batch: list[tuple[bytes, str]] = []
        while self._waiting and len(batch) < _AT_ONCE:
            key, salt = self._waiting.popitem(last=False)
            if self._cache.match((key,)):
                batch.append((key, salt))
        keys = [key for key, _ in batch]
        if not keys:
            return False
        pin = self._cache.pin("offloaded", len(keys), keys, time.monotonic() + self._lease_s)
        if pin is None:
            self._waiting = OrderedDict(batch) | self._waiting  # prompts need the pool now
            return False
        placed = [TierBlock(key, salt, place) for (key, salt), place in zip(batch, pin.table, strict=True)]
        writing = loop.run_in_executor(self._thread, self._tiers.put, placed)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,), timeout=self._lease_s)  # nothing else makes the blocks safe to reuse
            raise
        finally:
            self._cache.unpin(pin, keys[::-1])  # in the order of their prompts, so that their ends are evicted first
            self._on_change()
        self._note_written(keys)
        return bool(self._waiting)

    def _note_written(self, keys: Sequence[bytes]) -> None:
        now = time.monotonic()
        for key in keys:
            self._written.pop(key, None)
            self._written[key] = now
        while len(self._written) > min(_MOST_WAITING, self._tiers.num_places // 2):
            self._written.popitem(last=False)
