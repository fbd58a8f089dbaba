"""Maps a pool's memory before it is written: the first write to a page costs 2 to 15 µs.

For 1,024 tokens of the default model that is up to 100 ms, in the step that computes them and again where they arrive. So a
thread of low priority has the kernel map blocks ahead of those in use; `BlockManager` hands out new ones in order. A pool that
is never filled never takes all its memory.
"""

from __future__ import annotations

import ctypes
import mmap
from threading import Thread

from engine.kv_pool import KVPool
from engine.niceness import PREFILL_NICENESS, be_nice

AHEAD_TOKENS = 8192
"""As many as may arrive between two steps."""
TOGETHER_TOKENS = 1024
"""0.1 s of work at most, with the default model."""

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Populator:
    """Of one pool in the processor's memory. There is a thread while there is work. One thread calls `reach`."""

    def __init__(self, pool: KVPool) -> None:
        self._num_blocks = pool.num_blocks
        self._ahead = AHEAD_TOKENS // pool.block_size
        self._together = TOGETHER_TOKENS // pool.block_size
        self._halves = [half for layer in pool.data for half in layer]
        """K and V of each layer, [blocks, block size, KV heads, head size]."""
        self._end = 0
        """Blocks before it are mapped, or the thread is at it."""
        self._thread: Thread | None = None

    def reach(self, block: int) -> None:
        """Blocks up to this one are in use: have those that follow mapped soon."""
        needed = min(self._num_blocks, block + 1 + self._ahead)
        if self._end >= needed or (self._thread is not None and self._thread.is_alive()):
            return
        begin, self._end = self._end, min(self._num_blocks, needed + self._together)
        self._thread = Thread(target=self._populate, args=(begin, self._end), name="kv-populate", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the thread has ended, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def _populate(self, begin: int, end: int) -> None:
        """Where the kernel can't (before Linux 5.14), the first writes pay."""
        be_nice(PREFILL_NICENESS)
        for first in range(begin, end, self._together):
            for half in self._halves:
                blocks = half[first : min(end, first + self._together)]
                page = blocks.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                _libc.madvise(page, blocks.data_ptr() + blocks.nbytes - page, _MADV_POPULATE_WRITE)
