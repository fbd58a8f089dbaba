"""Reads what a prompt needs out of a node's tiers, in threads, where that is sooner than computing it.

    match ──► so many blocks ──► read, one prompt at a time ──► so many of them hold what they should
      └── no answer in time ──┴──► OVERDUE: nobody asks this tier until its call returns; the blocks stay the reader's till then

What reading a block of a tier takes is measured with each read, also with one that was overdue. What looking takes is measured
with each look. Both are forgotten after a minute, so a tier that was slow once is tried again. A disk may hang for ever: then
prompts go on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kv_transfer.tiers.node_tiers import Tiers
from kv_transfer.tiers.overdue import Overdue

_KNOWN_S = 60.0
_MOST_READS = 4
"""Prompts that wait for a read of one tier. One more is computed."""


class TierReader:
    """One worker's reads. `token_s` says how many seconds computing a token takes there, 0 if that is not known. A read has to
    begin within `patience_s` seconds. From then on it may take as long, or twice that where so many blocks took long lately.
    """

    def __init__(self, tiers: Tiers, block_size: int, token_s: Callable[[], float], patience_s: float) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._token_s = token_s
        self._patience_s = patience_s
        self._looking = {name: _thread(f"kv-look-{name}") for name in tiers.names}
        self._reading = {name: _thread(f"kv-read-{name}") for name in tiers.names}
        self._reads = dict.fromkeys(tiers.names, 0)
        self._measured: dict[str, tuple[float, float]] = {}
        """Seconds of a block, and when that was, by tier."""
        self._looked: dict[str, tuple[float, float]] = {}
        """Seconds of the latest look, and when it ended, by tier."""
        self._overdue: dict[tuple[str, str], asyncio.Future[Any]] = {}
        """The look and the read that a tier did not answer in time."""

    @property
    def names(self) -> Sequence[str]:
        """The tiers that there are, the faster first."""
        return self._tiers.names

    def pays(self, name: str) -> bool:
        """Whether reading a block of this tier takes less than computing it, as far as is known, and it answers."""
        overdue = [self._overdue.get((name, what)) for what in ("look", "read")]
        if self._reads[name] >= _MOST_READS or any(call is not None and not call.done() for call in overdue):
            return False
        token_s = self._token_s()
        return not token_s or self._block_s(name) < token_s * self._block_size

    async def match(self, name: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks lie in this tier; 0 if it does not say so in time, and if computing so many takes
        less than the latest look did.
        """
        look_s, at = self._looked.get(name, (0.0, 0.0))
        if 0 < len(keys) * self._block_size * self._token_s() < look_s and time.monotonic() - at <= _KNOWN_S:
            return 0
        looking = asyncio.wrap_future(self._looking[name].submit(self._timed_look, name, keys))
        await asyncio.wait((looking,), timeout=self._patience_s)
        if not looking.done():
            self._overdue[name, "look"] = looking
            return 0
        return looking.result()

    async def read(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Fill blocks of the caller's own, one for each key. Returns how many of the first ones hold what they should.

        Raises Overdue if it has begun and not ended in time: then the blocks are being written until `Overdue.reading` is done.
        Where it is cancelled, nothing writes into them any more, or the process ends.
        """
        began: list[float] = []
        submitted = self._reading[name].submit(self._timed, name, keys, blocks, began)
        reading = asyncio.wrap_future(submitted)
        self._reads[name] += 1
        reading.add_done_callback(lambda _: self._read(name))
        try:
            await asyncio.wait((reading,), timeout=self._patience_s)
            if not reading.done() and submitted.cancel():
                return 0
            longest_s = self._patience_s + min(self._patience_s, 2 * self._block_s(name) * len(keys))
            now = time.monotonic()
            began_at = began[0] if began else now  # the thread has just taken it
            await asyncio.wait((reading,), timeout=began_at + longest_s - now)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await asyncio.wait((reading,), timeout=self._patience_s)
            raise
        if not reading.done():
            self._overdue[name, "read"] = reading
            raise Overdue(reading)
        return reading.result()

    def _block_s(self, name: str) -> float:
        """Seconds that a block took lately, 0 if that is not known."""
        block_s, at = self._measured.get(name, (0.0, 0.0))
        return block_s if time.monotonic() - at <= _KNOWN_S else 0.0

    def close(self) -> None:
        """Read nothing more."""
        for thread in (*self._looking.values(), *self._reading.values()):
            thread.shutdown(wait=False, cancel_futures=True)

    def _timed_look(self, name: str, keys: Sequence[bytes]) -> int:
        began = time.monotonic()
        count = self._tiers.match(name, keys)
        self._looked[name] = ((ended := time.monotonic()) - began, ended)
        return count

    def _timed(self, name: str, keys: Sequence[bytes], blocks: Sequence[int], began: list[float]) -> int:
        """Read, and put into `began` when that began."""
        began.append(time.monotonic())
        count = self._tiers.get(name, keys, blocks)
        if count:  # what is missing, or damaged, takes less
            self._measured[name] = ((ended := time.monotonic()) - began[0]) / len(keys), ended
        return count

    def _read(self, name: str) -> None:
        self._reads[name] -= 1


def _thread(name: str) -> ThreadPoolExecutor:
    """A thread that runs from now on: where no more can be had, a worker is to find out when it starts, not amid prompts."""
    thread = ThreadPoolExecutor(1, name)
    thread.submit(int)
    return thread
