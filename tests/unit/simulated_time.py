"""An event loop whose clock stands still while something runs, and leaps to the next timer when nothing does.

So a test of what is due when says the same on a busy machine, and takes no time. For tasks that wait for timers and for each
other alone: what waits for a socket, a thread or a process would never see it become ready.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _NothingComes(selectors.DefaultSelector):
    """Instead of waiting so long for a file, let so much time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for another one: nothing will ever happen"
        self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector_clock = _NothingComes()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now


def run_in_simulated_time(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` by such a clock; `loop.time()` begins at 0 seconds."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)
