"""A block's file and its row in the index, which come and go together: the file inside of the row's transaction.

Every process of the node has to wait for the others' transactions. So blocks that are stored together are one.

A process that is killed in between leaves a row without a file, which is a miss, or a file without a row. `bring_in_line` finds
both: after an index was opened, and before blocks are erased.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kv_transfer.tiers.block_file import BlockFiles, Found, Inspected
from kv_transfer.tiers.folder import locked
from kv_transfer.tiers.store_index import Rows, StoreIndex

_AT_ONCE = 256
"""Blocks that one transaction removes or adds, at most."""
_LOCK_S = 60.0


class Written(NamedTuple):
    """A block that is to be stored."""

    path: str | None
    """The file that it was written to; None if it is stored already."""
    key: bytes
    tenant: bytes
    """The tag of its tenant (`block_file.tenant_tag`)."""


class Added(NamedTuple):
    """What came of blocks that were to be stored."""

    num_new: int
    """Not those that another process has stored meanwhile."""
    errors: list[OSError]
    """Why some can't be stored."""


class Pairs:
    """Changes files and rows. Which index it is, each call says. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        files: BlockFiles,
        max_bytes: int,
        on_removed: Callable[[Found], None],
        on_evicted: Callable[[int], None],
    ) -> None:
        """`on_removed` is told what each removed file was that did not fit, `on_evicted` the number of blocks that gave way."""
        self._folder = folder
        self._files = files
        self._max_bytes = max_bytes
        self._on_removed = on_removed
        self._on_evicted = on_evicted

    def add(self, index: StoreIndex, blocks: Sequence[Written], uses: Iterable[tuple[bytes, int]]) -> Added:
        """Move files to their places, and evict others for them. The first of the blocks counts as used first.

        Before that it notes the `uses` of other blocks: their keys, and when, by `time.monotonic_ns`. Raises sqlite3.Error, and
        then has stored none.
        """
        moved: list[bytes] = []
        errors: list[OSError] = []
        try:
            with index.transaction() as rows:
                rows.touch(uses)
                for block in blocks:
                    try:
                        moved += [block.key] if self._add_one(rows, block) else []
                    except OSError as error:
                        errors.append(error)
                num_evicted = self._evict(rows)
        except sqlite3.Error:
            for key in moved:
                self._files.remove(key)
            raise
        self._on_evicted(num_evicted)
        return Added(len(moved), errors)

    def _add_one(self, rows: Rows, block: Written) -> bool:
        """Return whether it is new. Raises sqlite3.Error; OSError if it can't be moved, and then nothing is changed."""
        path, key, tenant = block
        if path is None or self._is_stored(rows, key):
            rows.touch([(key, None)])
            return False
        self._files.move(path, key)
        try:
            rows.insert(key, tenant, self._files.file_bytes)
        except sqlite3.Error:
            self._files.remove(key)
            raise
        return True

    def _is_stored(self, rows: Rows, key: bytes) -> bool:
        """Whether a block has its row and its file. A row alone is removed."""
        if not rows.has(key):
            return False
        if self._files.exists(key):
            return True
        rows.delete(key)
        return False

    def forget(self, index: StoreIndex, key: bytes, inspected: Inspected) -> None:
        """Remove a block that was found not to be whole, unless it was stored anew meanwhile. Raises sqlite3.Error."""
        if inspected.found is Found.MISSING and not index.has(key):
            return
        with index.transaction() as rows:
            if inspected.found is Found.MISSING:
                if not self._files.exists(key):
                    rows.delete(key)
            elif self._files.is_still(key, inspected):
                rows.delete(key)
                self._files.remove(key)
                self._on_removed(inspected.found)

    def erase(self, index: StoreIndex, tenant: bytes | None) -> int | None:
        """Remove the blocks of a tenant or of all tenants. Returns their number, or None if one can't be removed.

        Raises sqlite3.Error.
        """
        num_erased = 0
        while True:
            with index.transaction() as rows:
                keys = rows.some_of(tenant, _AT_ONCE)
                for key in keys:
                    if not self._files.remove(key):
                        return None
                    rows.delete_found(key)
            num_erased += len(keys)
            if not keys:
                return num_erased

    def bring_in_line(self, index: StoreIndex, stopped: Callable[[], bool]) -> bool:
        """Give each file that fits a row, remove the others and the rows without a file, and evict what is too much. Returns
        False if it was stopped, or a file can't be opened or removed.

        One process at a time does it, while others store and evict. Raises sqlite3.Error, among them DamagedIndexError if the
        index is not sound, and OSError, among them TimeoutError if others are at it for too long.
        """
        with locked(self._folder / "lock-scan", _LOCK_S, stopped):
            index.check()
            is_settled = True
            for first in range(256):
                if stopped():
                    return False
                # Files first: a block that is stored in between has a row, and is looked at again before the row is deleted.
                named = self._files.keys_with(first)
                is_settled &= self._settle(index, named ^ index.keys_with(first))
            if not index.is_counted_right():
                with index.transaction() as rows:
                    rows.recount()
        num_evicted = _AT_ONCE
        while num_evicted == _AT_ONCE and not stopped():
            with index.transaction() as rows:
                num_evicted = self._evict(rows)
            self._on_evicted(num_evicted)
        return is_settled and not stopped()

    def _settle(self, index: StoreIndex, keys: set[bytes]) -> bool:
        """Look at blocks that seemed to have only a file or only a row. Returns False if a file can't be opened or removed."""
        is_settled, differ = True, iter(keys)
        while some := list(islice(differ, _AT_ONCE)):
            looked_at = [(key, self._files.look(key)) for key in some]
            with index.transaction() as rows:
                for key, inspected in looked_at:
                    is_settled &= self._settle_one(rows, key, inspected)
        return is_settled

    def _settle_one(self, rows: Rows, key: bytes, inspected: Inspected) -> bool:
        if rows.has(key):
            if not self._files.exists(key):
                rows.delete(key)
        elif self._files.is_still(key, inspected):
            if inspected.found is Found.WHOLE:
                rows.insert(key, inspected.tenant, self._files.file_bytes, inspected.written_ns)
            elif inspected.found is Found.MISSING or not self._files.remove(key):  # it is there, and could not be opened
                return False
            else:
                self._on_removed(inspected.found)
        return True

    def _evict(self, rows: Rows) -> int:
        """Remove the blocks used least recently while there are too many, some at once. Returns their number."""
        for count in range(_AT_ONCE):
            if rows.num_bytes() <= self._max_bytes:
                return count
            key = rows.oldest()
            if key is None:
                rows.recount()
                return count
            rows.delete_found(key)
            self._files.remove(key)
        return _AT_ONCE
