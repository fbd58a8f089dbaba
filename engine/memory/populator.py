"""Maps a pool's memory before it is written: the first write to a page costs 2 to 15 µs.

For 1,024 tokens of the default model that is up to 100 ms, in the step that computes them and again where they arrive. So a
thread of low priority has the kernel map blocks before they are used; `BlockManager` hands out new ones in order:

    what a step needed at most ── AHEAD_TOKENS ──┐ mapped whatever is computed
    what the pool may keep ──────────────────────┴ mapped while nothing is ── the rest: never touched

Under load the thread takes from the prompts that it works for, so what can be mapped before is, unless half of the machine's
memory was taken when the pool was made. A pool that is never filled never takes all its memory.

The interpreter waits for the thread when the process ends, which ends it at once: a thread that released a tensor later would
abort the process.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, main_thread

from engine.memory.kv_pool import KVPool
from engine.niceness import PREFILL_NICENESS, be_nice

AHEAD_TOKENS = 2048
"""Tokens mapped ahead at any time: as many as may arrive between two steps."""
TOGETHER_TOKENS = 256
"""Tokens mapped without a pause. They take 25 ms at most with the default model, and a request may arrive meanwhile."""
_IDLE_S = 0.1
"""After the last step, and from one look at it to the next."""

_MEMINFO = Path("/proc/meminfo")
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class Populator:
    """Maps the memory of one pool ahead of its use. A thread of low priority runs while there is something to map."""

    def __init__(self, pool: KVPool) -> None:
        self._num_blocks = pool.num_blocks
        self._num_kept = pool.num_kept
        self._idle_blocks = 0 if memory_is_short() else pool.num_kept
        """Blocks to map while nothing is computed."""
        self._ahead, self._together = AHEAD_TOKENS // pool.block_size, TOGETHER_TOKENS // pool.block_size
        self._halves = [half for layer in pool.data for half in layer]
        """K and V of each layer, [blocks, block size, KV heads, head size]."""
        self._needed = 0
        """Most blocks that steps needed."""
        self._end = 0
        """Blocks before it are mapped. Only the thread moves it."""
        self._idle_since: float | None = time.monotonic()
        """None during a step."""
        self._thread = self._started()

    @contextmanager
    def step(self, tables: Sequence[Sequence[int]]) -> Iterator[None]:
        """Tell that a step of these block tables is computed inside this context. One thread has steps."""
        self._idle_since = None
        highest = max(table[-1] for table in tables)
        if highest >= self._num_kept:
            self._needed = max(self._needed, highest + 1)
        elif sum(map(len, tables)) > self._needed:
            self._needed = max(self._needed, len(set().union(*tables)))
        if self._end < self._until_idle and not self._thread.is_alive():
            self._thread = self._started()
        try:
            yield
        finally:
            self._idle_since = time.monotonic()

    def wait(self) -> None:
        """Return when nothing is left to map."""
        self._thread.join()

    def _started(self) -> Thread:
        thread = Thread(target=self._populate, name="kv-populate")
        thread.start()
        return thread

    @property
    def _until(self) -> int:
        """Blocks before it are mapped at any time."""
        return min(self._num_blocks, self._needed + self._ahead)

    @property
    def _until_idle(self) -> int:
        return max(self._until, self._idle_blocks)

    def _populate(self) -> None:
        """Where the kernel can't (before Linux 5.14), the first writes pay."""
        be_nice(PREFILL_NICENESS)
        while self._end < self._until_idle and main_thread().is_alive():
            if self._end >= self._until and not self._is_idle():
                time.sleep(_IDLE_S)
                continue
            end = min(self._until_idle, self._end + self._together)
            for half in self._halves:
                blocks = half[self._end : end]
                page = blocks.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
                _libc.madvise(page, blocks.data_ptr() + blocks.nbytes - page, _MADV_POPULATE_WRITE)
            self._end = end

    def _is_idle(self) -> bool:
        since = self._idle_since
        return since is not None and time.monotonic() - since >= _IDLE_S


def memory_is_short() -> bool:
    """Whether less than half of this machine's memory can be had. Unknown elsewhere than on Linux, where nothing is mapped."""
    if not _MEMINFO.exists():
        return False
    lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
    kib = {name: int(value.split()[0]) for name, _, value in lines}
    return kib["MemAvailable"] < kib["MemTotal"] / 2
