"""Who goes first where workers share cores: running streams.

Prefill's computing thread, and what only prepares, are nicer to others by `PREFILL_NICENESS`. Where a prefill and a decode
worker have a core each, and the router takes part of one, it is prefill that waits. Where as many decode workers are busy as
there are cores, prefill still has a third of one: Linux gives it 423 parts where they have 1,024 each. With a niceness of 10
it would have a tenth, and a long prompt on a slow machine would wait for minutes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

PREFILL_NICENESS = 4
_Result = TypeVar("_Result")


def be_nice(more: int) -> None:
    """This thread and those that it will start, by so much more than the process: on Linux every thread has its own."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getpid()) + more)


class NiceThread:
    """One thread that works, nicer to others than the process by its `niceness`."""

    def __init__(self, niceness: int = 0) -> None:
        self.niceness = niceness
        self._thread = ThreadPoolExecutor(1, "engine", be_nice, (niceness,))

    def run(self, work: Callable[..., _Result], *args: Any) -> asyncio.Future[_Result]:
        """Have `work(*args)` done after what was asked for before; the future is what it returns or raises."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def renice(self, niceness: int) -> None:
        """Work with another niceness from now on. Not while something runs: a thread can't be less nice than it was, so this
        is a new one.
        """
        if niceness != self.niceness:
            self.close()
            self.niceness = niceness
            self._thread = ThreadPoolExecutor(1, "engine", be_nice, (niceness,))

    def close(self) -> None:
        """Let the thread end after what was asked for."""
        self._thread.shutdown(wait=False)
