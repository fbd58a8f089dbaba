"""Ctrl-C and SIGTERM, once and again: the first one ends a cluster gently, the next one at once, and no other disturbs the end.

    STARTING ──signal──► ENDING
    SERVING ──signal──► RETIRING ──signal, or done──► ENDING      each arrow by a signal is a KeyboardInterrupt
                                                                  ENDING: signals do nothing

What ends then (Ray, its processes, folders) must end wholly, which an impatient third Ctrl-C would prevent.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType


class Phase(Enum):
    """What a command is doing when a signal comes."""

    STARTING = auto()
    SERVING = auto()
    RETIRING = auto()
    ENDING = auto()


_NEXT = {Phase.STARTING: Phase.ENDING, Phase.SERVING: Phase.RETIRING, Phase.RETIRING: Phase.ENDING}


class Interrupts:
    """This process's reaction to SIGINT and SIGTERM. `install` it in the main thread; set `phase` as work goes on."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING

    def install(self) -> None:
        """React to both signals from now on. SIGINT too, since a shell starts background jobs with it ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.phase is not Phase.ENDING:
            self.phase = _NEXT[self.phase]
            raise KeyboardInterrupt


@contextmanager
def undone_when_ended() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP are a SystemExit in the main thread, so that the block can undo what it did.

    Only the first one is. A signal that is ignored, as SIGHUP is under `nohup`, stays so.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
