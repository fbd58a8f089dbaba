"""What is said about messages and connections that are refused."""

from __future__ import annotations

import logging
import time

_GAP_S = 1.0


class Refusals:
    """Log lines that somebody outside can cause: one a second of each kind, so that a flood neither fills the disk nor keeps
    the loop from its work."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}
        """When each kind was last said, and how often it was not since."""

    def warn(self, kind: str, *args: object) -> None:
        """Log the line `kind % args` as a warning, or only count it."""
        self._say(logging.WARNING, kind, args)

    def note(self, kind: str, *args: object) -> None:
        """Log the line `kind % args` for what may be no refusal at all, or only count it."""
        self._say(logging.INFO, kind, args)

    def _say(self, level: int, kind: str, args: tuple[object, ...]) -> None:
        now = time.monotonic()
        said_at, unsaid = self._said.get(kind, (-_GAP_S, 0))
        if now - said_at < _GAP_S:
            self._said[kind] = (said_at, unsaid + 1)
            return
        self._said[kind] = (now, 0)
        if unsaid:
            kind = f"{kind} (and {unsaid} more like this)"
        self._log.log(level, kind, *args)
