"""Threads for long texts: whatever takes long over a text or its tokens must not hold up the loop that serves all streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_THREADS = 2
_SHORT = 4096
"""Work on up to so many characters, bytes or tokens is done at once: that takes less time than it takes to wake a thread."""

_T = TypeVar("_T")


class TextThreads:
    """A small pool of threads. It is closed by its owner; what waits for a thread by then is cancelled."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-text")

    async def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Return `work(*args)`, computed in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args))

    async def offload(self, size: int, work: Callable[..., _T], *args: Any) -> _T:
        """Return `work(*args)`, computed in a thread if its `size` (characters, bytes or tokens) would hold up the loop."""
        return work(*args) if size <= _SHORT else await self.run(work, *args)

    def close(self) -> None:
        """Return when every thread has ended."""
        self._executor.shutdown(wait=True, cancel_futures=True)
