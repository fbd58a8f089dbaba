"""Which index a folder has: opened, opened again after another process has replaced it, and made anew when it is damaged.

    none ──► open ──► damaged, or of other blocks ──► removed, and an empty one under a new name
              ▲  └──► its file is gone: somebody has replaced it ──┐
              └────────────────────────────────────────────────────┘

Only one process at a time opens or replaces an index, under a lock. A folder has one index, and its blocks are of one
description: the last who opens the folder decides of which. A process that finds the index replaced by one of other blocks is
done with the folder.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from kv_transfer.tiers.folder import locked, open_folder
from kv_transfer.tiers.store_index import StoreIndex, is_damage
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Least time from one replacement of an index, or failed attempt at it, to the next."""
_LOCK_S = 2.0
_NAMES = "index-*.db"


class CurrentIndex:
    """The index of a folder, as long as there is one that works. Thread-safe."""

    def __init__(self, folder: Path, described: bytes, on_open: Callable[[StoreIndex], None]) -> None:
        """`on_open` is told each index that is opened from now on."""
        self._folder = folder
        self._described = described
        self._on_open = on_open
        self._lock = Lock()
        self._open: StoreIndex | None = None
        self._ever_opened = False
        self._done = False
        self._next_try = 0.0
        self.num_rebuilt = 0
        """Indices that were damaged and that this object has replaced."""

    def get(self) -> StoreIndex | None:
        """Return the index, or None while none can be had."""
        found = self._open
        if found is None or not found.is_current():
            self._replace(found, damaged=False)
            found = self._open
        return found

    def report(self, index: StoreIndex, error: sqlite3.Error) -> None:
        """Replace an index if this error, which it has raised, means that it is damaged."""
        if is_damage(error):
            self._replace(index, damaged=True)

    def close(self) -> None:
        """There is no index from now on."""
        with self._lock:
            self._done = True
            self._drop()

    def _replace(self, old: StoreIndex | None, damaged: bool) -> None:
        with self._lock:
            if self._open is not old or self._done:
                return
            now = time.monotonic()
            if now < self._next_try:
                if not damaged:
                    self._drop()
                return
            self._drop()
            try:
                open_folder(self._folder)  # somebody may have removed all of it
                with locked(self._folder / "lock-index", _LOCK_S):
                    self._open = self._find(old.path if old is not None and damaged else None)
            except (OSError, ConfigError, sqlite3.Error) as error:
                log.warning("%s: without an index: %s", self._folder, error)
            if damaged or self._open is None:
                self._next_try = now + PAUSE_S
            found = self._open
        if found is not None:
            self._ever_opened = True
            self._on_open(found)

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _find(self, damaged: Path | None) -> StoreIndex | None:
        """Open the index that is there, or make one."""
        paths = list(self._folder.glob(_NAMES))
        if len(paths) == 1 and paths[0] != damaged:
            try:
                found = StoreIndex(paths[0])
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                damaged = paths[0]
            else:
                if found.described == self._described:
                    return found
                found.close()
                if self._ever_opened:
                    log.warning("%s: somebody stores other blocks there now", self._folder)
                    self._done = True
                    return None
        if damaged is not None:
            log.warning("%s: damaged, and made anew from the files", damaged)
            self.num_rebuilt += 1
        for path in self._folder.glob(f"{_NAMES}*"):
            path.unlink(missing_ok=True)
        return StoreIndex.create(self._folder, self._described)
