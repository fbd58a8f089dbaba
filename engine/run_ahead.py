"""How far the host may be ahead of a GPU: one step, or none.

A step that samples nothing gives the host nothing to wait for. Without a limit it would launch a long prompt's chunks one after
the other within milliseconds: cancelling would take as many steps as were launched, and what a step takes would be unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Mark(Protocol):
    """A place in what a device has been given to do, as a CUDA event marks it."""

    def synchronize(self) -> None:
        """Wait until the device has come so far."""


class RunAhead:
    """Told of each step that was launched, it returns when the one so many `steps` before is done, 0 or 1. `mark` makes a mark
    behind all that was launched.
    """

    def __init__(self, mark: Callable[[], Mark], steps: int = 1) -> None:
        assert steps in (0, 1), "the host waits for one step, or for the one before"
        self._mark = mark
        self._steps = steps
        self._latest: Mark | None = None

    def launched(self) -> None:
        """Wait as long as the host would be too far ahead."""
        before, self._latest = self._latest, self._mark()
        awaited = before if self._steps else self._latest
        if awaited is not None:
            awaited.synchronize()
