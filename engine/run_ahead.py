"""How far the host may be ahead of a GPU: one step.

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
    """Told of each step that was launched, it returns when the one before is done. `mark` makes a mark behind all that was
    launched.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._latest: Mark | None = None

    def launched(self) -> None:
        """Wait for the step before this one."""
        before, self._latest = self._latest, self._mark()
        if before is not None:
            before.synchronize()
