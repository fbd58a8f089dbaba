"""Reads what a prompt needs out of a node's tiers, in a thread, where that is sooner than computing it.

What reading a block of a tier takes is measured with each read, and forgotten after a minute: so a tier that was slow once is
tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.tiers.node_tiers import NodeTiers

_KNOWN_S = 60.0


class TierReader:
    """One worker's reads. `token_s` says how many seconds computing a token takes there; 0 if that is not known yet."""

    def __init__(self, tiers: NodeTiers, block_size: int, token_s: Callable[[], float]) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._token_s = token_s
        self._thread = ThreadPoolExecutor(1, "kv-read")
        self._measured: dict[str, tuple[float, float]] = {}
        """Seconds of a block, and when that was, by tier."""

    @property
    def names(self) -> Sequence[str]:
        """The tiers that there are, the faster first."""
        return self._tiers.names

    def pays(self, name: str) -> bool:
        """Whether reading a block of this tier takes less than computing it, as far as is known."""
        block_s, at = self._measured.get(name, (0.0, 0.0))
        token_s = self._token_s()
        return not token_s or time.monotonic() - at > _KNOWN_S or block_s < token_s * self._block_size

    async def match(self, name: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks lie in this tier."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._tiers.match, name, keys)

    async def read(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Fill blocks of the caller's own, one for each key. Returns how many of the first ones hold what they should.

        Also when it is cancelled, nothing writes into the blocks any more.
        """
        began = time.monotonic()
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._tiers.get, name, keys, blocks)
        try:
            count = await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait((reading,))
            raise
        if count:
            self._measured[name] = ((time.monotonic() - began) / count, time.monotonic())
        return count

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
