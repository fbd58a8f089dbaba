"""Blocks of KV cache in files of one folder, which all workers of a node share: the memory tier, in tmpfs, and the disk tier.

    put ──► stored ──► used least recently, and more than `max_bytes` are stored ──► evicted
              ├── get ──► used just now
              ├── found damaged, foreign or gone ──► a miss, and removed
              └── reset ──► erased

A block is known by its chained key (`protocol.cache.keys`) and never changes. `block_file` has the files, `store_index` the
database that says which there are, `current_index` which database it is, and `pairs` changes files and database together.

Only a file that fits its checksums is ever given out, whatever the database says. So what goes wrong is a miss: a caller sees
errors at opening, and where blocks could not be erased. No block and no database is mapped: a file that another process cuts
short would end ours. (SQLite maps its own index-*.db-shm.)
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

from kv_transfer.tiers.block_file import BlockFiles, Found, Inspected, tenant_tag
from kv_transfer.tiers.current_index import CurrentIndex
from kv_transfer.tiers.folder import open_folder
from kv_transfer.tiers.pairs import Pairs, Written
from kv_transfer.tiers.store_index import StoreIndex
from protocol.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")

_NOTED = 1024
"""Blocks that were read and not yet noted as used in the index, at most."""
_OPENING_S = 1.0
"""How long opening waits for files and index to be in line."""
_ATTEMPTS = 3


@dataclass
class StoreStats:
    """What one store has done since it was opened."""

    stored: int = 0
    evicted: int = 0
    damaged: int = 0
    foreign: int = 0
    failed_writes: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    rebuilt: int = 0
    """Databases that were damaged and made anew."""


class BlockStore:
    """The blocks of one folder. Thread-safe; any number of them, in any processes of one user, may share a folder.

    Blocks that were used at the same time are evicted in the order of their use. So put and get the last block of a prefix
    first: then what is left of it can still be matched.
    """

    def __init__(self, folder: Path, described: bytes, block_bytes: int, max_bytes: int) -> None:
        """`described` says how blocks are laid out and computed. Blocks of another description are foreign, and removed.

        `max_bytes` counts files in whole pages (`file_bytes`), not the index. Raises ConfigError if the folder can't be made,
        belongs to another user or is open to others, or if not one block fits.
        """
        try:
            open_folder(folder)
            self._files = BlockFiles(folder, described, block_bytes)
            self._files.remove_leftovers()
        except OSError as error:
            raise ConfigError(f"{folder}: can't be written: {error.strerror}") from None
        self.file_bytes = self._files.file_bytes
        """Bytes that each block takes."""
        self.num_places = max_bytes // self.file_bytes
        """Blocks that fit."""
        if max_bytes < self.file_bytes:
            raise ConfigError(f"{folder}: one block takes {self.file_bytes} bytes, and only {max_bytes} are allowed")
        self._folder = folder
        self._block_bytes = block_bytes
        self._lock = Lock()
        """Guards the counts, the notes and the list of scans."""
        self._counts = StoreStats()
        self._noted: dict[bytes, int] = {}
        """Blocks that were used and not yet noted so in the index, the latest last, and when, by `time.monotonic_ns`."""
        self._scans: list[Thread] = []
        self._closed = False
        self._warned = False
        self._pairs = Pairs(folder, self._files, max_bytes, self._count_removed, self._count_evicted)
        self._current = CurrentIndex(folder, self._files.described, self._start_scan)
        self._current.get()
        self.wait_until_found(_OPENING_S)

    def wait_until_found(self, timeout_s: float) -> bool:
        """Wait until all files that others have left here are found. Returns False if it takes longer."""
        deadline = time.monotonic() + timeout_s
        for each in iter(self._scanning, None):
            each.join(max(deadline - time.monotonic(), 0.0))
            if each.is_alive():
                return False
        return True

    @property
    def num_blocks(self) -> int:
        """Number of blocks stored by all processes."""
        return self._ask(StoreIndex.counts, (0, 0))[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks stored by all processes."""
        return self._ask(StoreIndex.counts, (0, 0))[1]

    @property
    def stats(self) -> StoreStats:
        """Return counts of what this store has done since it was opened."""
        with self._lock:
            return replace(self._counts, rebuilt=self._current.num_rebuilt)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are stored. `get` may still miss them."""
        return self._ask(lambda index: index.match(keys), 0)

    def put(self, blocks: Iterable[tuple[bytes, str, Sequence[memoryview]]]) -> int:
        """Store blocks, and evict those used least recently for them: key, tenant, and the bytes, one part after the other. A
        block's bytes are written before the next block is asked for.

        Returns how many are new. Of one that is stored already it notes that it is used. One that can't be written is counted.
        """
        with ExitStack() as temporary:
            found = [self._found_or_written(key, tenant, parts, temporary) for key, tenant, parts in blocks]
            there = [each for each in found if each is not None]
            num_stored, num_failed = self._add(there)
        with self._lock:
            self._counts.failed_writes += len(found) - len(there) + num_failed
            self._counts.stored += num_stored
            self._counts.bytes_written += num_stored * self._block_bytes
        return num_stored

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Read a block into `parts`. If it returns False, they may hold anything."""
        inspected = Inspected(Found.MISSING) if self._current.get() is None else self._files.read(key, parts)
        if inspected.found is not Found.WHOLE:
            self._ask(lambda index: self._pairs.forget(index, key, inspected), None)
            return False
        with self._lock:
            self._counts.bytes_read += self._block_bytes
        self._note(key)
        return True

    def reset(self, tenant: str | None = None) -> int:
        """Erase the blocks of a tenant, or all, whichever process has stored them. Returns their number.

        Raises UnavailableError if some may be left.
        """
        tag = None if tenant is None else tenant_tag(tenant)
        for _ in range(_ATTEMPTS):
            # A block is erased by its row, so each file has to have one.
            if self._ask(self._bring_in_line, False):
                erased = self._ask(lambda index: self._pairs.erase(index, tag), None)
                if erased is not None:
                    return erased
        raise UnavailableError(f"{self._folder}: blocks could not be erased")

    def note_uses(self) -> None:
        """Let other processes know which blocks were used: each evicts by what it knows."""
        if self._noted:
            self._ask(self._touch_noted, None)

    def close(self) -> None:
        """Let go of the folder. Every block is a miss afterwards."""
        self.note_uses()
        self._closed = True
        for each in iter(self._scanning, None):
            each.join()
        self._current.close()

    def _ask(self, question: Callable[[StoreIndex], T], otherwise: T) -> T:
        """Ask the index. If there is none, or it fails, the answer is `otherwise`."""
        index = self._current.get()
        if index is None:
            return otherwise
        try:
            return question(index)
        except sqlite3.Error as error:
            self._current.report(index, error)
            return otherwise

    def _found_or_written(self, key: bytes, tenant: str, parts: Sequence[memoryview], temporary: ExitStack) -> Written | None:
        """Write a block that is not stored yet to a file, until `temporary` closes. None if it can't be written."""
        is_there = self._ask(lambda index: index.has(key) and self._files.exists(key), None)
        if is_there is None:
            return None
        tag = tenant_tag(tenant)
        try:
            path = None if is_there else temporary.enter_context(self._files.written(key, tag, parts))
        except OSError as error:
            self._warn(error)
            return None
        return Written(path, key, tag)

    def _add(self, blocks: Sequence[Written]) -> tuple[int, int]:
        """Store what was written. Returns how many are new, and how many can't be stored."""
        num_written = sum(each.path is not None for each in blocks)
        if not num_written:
            for each in blocks:
                self._note(each.key)
            return 0, 0
        added = self._ask(lambda index: self._pairs.add(index, blocks, self._take_notes()), None)
        if added is None:
            return 0, num_written
        for error in added.errors[:1]:
            self._warn(error)
        return added.num_new, len(added.errors)

    def _warn(self, error: OSError) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        log.log(level, "%s: blocks can't be written: %s", self._folder, error.strerror)
        self._warned = True

    def _start_scan(self, index: StoreIndex) -> None:
        """Bring an index that was just opened in line with the files, in a thread of its own."""
        thread = Thread(target=self._ask, args=(self._bring_in_line, False), name="scan-blocks", daemon=True)
        thread.start()
        with self._lock:
            self._scans = [*(each for each in self._scans if each.is_alive()), thread]

    def _scanning(self) -> Thread | None:
        with self._lock:
            return next((each for each in self._scans if each.is_alive()), None)

    def _bring_in_line(self, index: StoreIndex) -> bool:
        """Return whether each file has its row now, and each row its file."""
        try:
            self._files.remove_leftovers()
            return self._pairs.bring_in_line(index, lambda: self._closed)
        except OSError as error:
            log.log(logging.DEBUG if self._closed else logging.WARNING, "%s: not looked through: %s", self._folder, error)
            return False

    def _count_removed(self, found: Found) -> None:
        with self._lock:
            self._counts.foreign += found is Found.FOREIGN
            self._counts.damaged += found is Found.DAMAGED

    def _count_evicted(self, count: int) -> None:
        with self._lock:
            self._counts.evicted += count

    def _note(self, key: bytes) -> None:
        """Note that a block was used. The index hears of it later, of many at once."""
        with self._lock:
            self._noted.pop(key, None)
            self._noted[key] = time.monotonic_ns()
            is_due = len(self._noted) >= _NOTED
        if is_due:
            self.note_uses()

    def _touch_noted(self, index: StoreIndex) -> None:
        with index.transaction() as rows:
            rows.touch(self._take_notes())

    def _take_notes(self) -> list[tuple[bytes, int]]:
        """Blocks that were used, and when, by `time.monotonic_ns`: what others have stored since is newer."""
        with self._lock:
            noted, self._noted = self._noted, {}
        return list(noted.items())
