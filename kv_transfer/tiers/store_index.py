"""The index of a folder of blocks: which there are, and when each was last used. A SQLite database.

    insert ──► a row of `blocks` ──► delete
        └── triggers count it in `state` ──┘

All processes of a node that share the folder use one database, and each change is one short transaction. A process that is
killed leaves no half of one. The database is never synced to the disk: a power cut may damage it, and then the files say which
blocks there are (`kv_transfer.tiers.pairs`).

The last use of a block is a time in ns that only grows: where the clock has been set back, one more than the latest.

Whatever is wrong with the database raises sqlite3.Error. `is_damage` tells what only a new database can mend.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Any

_BUSY_S = 1.0
"""How long to wait for another process's transaction."""
_LOOK_S = 0.001, 0.008
"""From one look whether it is over to the next, at first and in the end; up to twice that, at random. SQLite itself looks every
100 ms in the end: where many wait, some come too late again and again, while nobody holds the database."""
_MATCHED = 256
"""Keys that one query looks for."""
_FARTHEST_NS = 2**62
"""A last use after this, in the year 2116, is damage."""
_SCHEMA = """
CREATE TABLE blocks (
    key BLOB PRIMARY KEY CHECK (typeof(key) = 'blob' AND length(key) = 32),
    tenant BLOB NOT NULL CHECK (typeof(tenant) = 'blob'),
    bytes INTEGER NOT NULL CHECK (typeof(bytes) = 'integer'),
    last_use INTEGER NOT NULL CHECK (typeof(last_use) = 'integer')
) WITHOUT ROWID;
CREATE INDEX by_use ON blocks (last_use);
CREATE TABLE state (described BLOB NOT NULL, blocks INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TRIGGER block_gained AFTER INSERT ON blocks BEGIN
    UPDATE state SET blocks = blocks + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER block_lost AFTER DELETE ON blocks BEGIN
    UPDATE state SET blocks = blocks - 1, bytes = bytes - old.bytes;
END;
"""
_UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}
_HARMLESS = {
    sqlite3.SQLITE_IOERR,  # but those above
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
}
"""Errors that say nothing about what is in the database."""


class DamagedIndexError(sqlite3.DatabaseError):
    """The database holds what was never written."""


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the database has to be made anew. Others are of the moment, or of a connection that was closed."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, DamagedIndexError)
    return code in _UNREADABLE or code & 0xFF not in _HARMLESS


class Rows:
    """The blocks of an index, inside of a transaction that writes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def has(self, key: bytes) -> bool:
        """Return whether a block is in the index."""
        return self._execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def insert(self, key: bytes, tenant: bytes, num_bytes: int, last_use_ns: int | None = None) -> None:
        """Add a block that is not in the index. Unless an earlier last use is given, it is used now."""
        now = self._now_ns()
        used = now if last_use_ns is None else min(last_use_ns, now)
        self._execute("INSERT INTO blocks VALUES (?, ?, ?, ?)", (key, tenant, num_bytes, used))

    def delete(self, key: bytes) -> bool:
        """Take a block out of the index. Returns whether it was there."""
        return self._execute("DELETE FROM blocks WHERE key = ?", (key,)).rowcount == 1

    def delete_found(self, key: bytes) -> None:
        """Take a block out of the index that a query has found. Raises DamagedIndexError if it is not there."""
        if not self.delete(key):
            raise DamagedIndexError("a block is found in one way and not in the other")

    def touch(self, uses: Iterable[tuple[bytes, int | None]]) -> None:
        """Note when blocks were used, by `time.monotonic_ns`, in this order; None is now. What others used later stays so."""
        now = self._now_ns()
        began = now - time.monotonic_ns()  # read together: whoever is held between tells them apart
        for later, (key, at) in enumerate(uses):
            used = (now if at is None else began + at) + later
            self._execute("UPDATE blocks SET last_use = ? WHERE key = ? AND last_use < ?", (used, key, used))

    def oldest(self) -> bytes | None:
        """Return the block that was used least recently."""
        found = self._execute("SELECT key FROM blocks ORDER BY last_use LIMIT 1").fetchone()
        return None if found is None else _key(found[0])

    def some_of(self, tenant: bytes | None, count: int) -> list[bytes]:
        """Return up to `count` blocks of a tenant, or of all tenants."""
        found = self._execute("SELECT key FROM blocks WHERE ?1 IS NULL OR tenant = ?1 LIMIT ?2", (tenant, count))
        return [_key(key) for (key,) in found]

    def num_bytes(self) -> int:
        """Bytes of all blocks in the index."""
        return _whole(self._execute("SELECT bytes FROM state").fetchone())

    def recount(self) -> None:
        """Set the counts of blocks and bytes by the blocks that there are."""
        counts = "(SELECT count(*), coalesce(sum(bytes), 0) FROM blocks)"
        self._execute(f"UPDATE state SET (blocks, bytes) = {counts}")

    def _now_ns(self) -> int:
        latest = self._execute("SELECT max(last_use) FROM blocks").fetchone()[0]
        if latest is None:
            return time.time_ns()
        if not isinstance(latest, int) or latest > _FARTHEST_NS:
            raise DamagedIndexError(f"{latest!r} is no time")
        return max(time.time_ns(), latest + 1)


class StoreIndex:
    """One open database. Thread-safe: who reads does not wait for who writes."""

    def __init__(self, path: Path) -> None:
        """Open a database. Raises sqlite3.Error, also if it is none of ours."""
        self.path = path
        self._reading, self._writing = Lock(), Lock()
        self._reader = _connect(path)
        try:
            described = self._reader.execute("SELECT described FROM state").fetchone()
            if described is None:
                raise DamagedIndexError("there is no state")
            self._writer = _connect(path)
            self._writer.execute("PRAGMA busy_timeout = 0")  # see `_begin`
        except sqlite3.Error:
            self._reader.close()
            raise
        self.described: bytes = described[0]
        """Of which blocks this is the index (see `BlockFiles.described`)."""
        self._rows = Rows(self._writer)

    @classmethod
    def create(cls, folder: Path, described: bytes) -> StoreIndex:
        """Make an empty database under a new name, which no connection to a former one knows. Raises OSError, sqlite3.Error."""
        path = folder / f"index-{token_hex(8)}.db"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # SQLite would open it to all
        connection = _connect(path)
        try:
            connection.executescript("BEGIN;" + _SCHEMA)
            connection.execute("INSERT INTO state VALUES (?, 0, 0)", (described,))
            connection.execute("COMMIT")
        finally:
            connection.close()
        return cls(path)

    def is_current(self) -> bool:
        """Return whether the database is still where it was opened."""
        return os.path.exists(self.path)

    def check(self) -> None:
        """Look through the whole database. Raises DamagedIndexError, or another sqlite3.Error."""
        connection = _connect(self.path)
        try:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        finally:
            connection.close()
        if found not in ("ok", b"ok"):
            raise DamagedIndexError(str(found))

    @contextmanager
    def transaction(self) -> Iterator[Rows]:
        """Hold the database against other writers. What is changed is there for all once the block ends without an error."""
        with self._writing:
            self._begin()
            try:
                if not self.is_current():
                    raise sqlite3.OperationalError("the index was replaced")
                yield self._rows
                self._writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise

    def _begin(self) -> None:
        """Begin a transaction that writes. Raises sqlite3.OperationalError where others hold the database for too long."""
        deadline = time.monotonic() + _BUSY_S
        look_s, longest_s = _LOOK_S
        while True:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
            time.sleep(look_s * random.uniform(1.0, 2.0))
            look_s = min(2 * look_s, longest_s)

    def has(self, key: bytes) -> bool:
        """Return whether a block is in the index."""
        with self._reading:
            return self._reader.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def match(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are in the index."""
        query = f"SELECT key FROM blocks WHERE key IN ({', '.join('?' * _MATCHED)})"
        for start in range(0, len(keys), _MATCHED):
            wanted = [*keys[start : start + _MATCHED], *(b"",) * (start + _MATCHED - len(keys))]
            with self._reading:
                found = {key for (key,) in self._reader.execute(query, wanted)}
            if not found.issuperset(keys[start : start + _MATCHED]):
                return start + next(place for place, key in enumerate(wanted) if key not in found)
        return len(keys)

    def keys_with(self, first: int) -> set[bytes]:
        """The keys that begin with this byte."""
        end = bytes([first + 1]) if first < 255 else b"\xff" * 33
        with self._reading:
            found = self._reader.execute("SELECT key FROM blocks WHERE key >= ? AND key < ?", (bytes([first]), end))
            return {_key(key) for (key,) in found}

    def counts(self) -> tuple[int, int]:
        """Return the number of blocks, and their bytes."""
        with self._reading:
            blocks, num_bytes = self._reader.execute("SELECT blocks, bytes FROM state").fetchone() or (None, None)
        return _whole((blocks,)), _whole((num_bytes,))

    def is_counted_right(self) -> bool:
        """Return whether the counts are those of the blocks that there are."""
        with self._reading:
            right = "SELECT (blocks, bytes) = (SELECT count(*), coalesce(sum(bytes), 0) FROM blocks) FROM state"
            return bool(self._reader.execute(right).fetchone() == (1,))

    def close(self) -> None:
        """Close the database, once nobody is using it."""
        with self._reading, self._writing:
            self._reader.close()
            self._writer.close()


class _Connection(sqlite3.Connection):
    def execute(self, *args: Any) -> sqlite3.Cursor:
        """As sqlite3's. An error that quotes a damaged schema is no text, which sqlite3 does not expect."""
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise DamagedIndexError(f"an error that can't be read: {error.object!r}") from None


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        uri, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, factory=_Connection, uri=True
    )
    connection.text_factory = bytes  # there is no text in it, unless it is damaged
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA mmap_size = 0")  # a mapped file that is cut short would end the process
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _key(found: object) -> bytes:
    if not isinstance(found, bytes) or len(found) != 32:
        raise DamagedIndexError(f"{found!r} is no key")
    return found


def _whole(row: tuple[object, ...] | None) -> int:
    if row is None or not isinstance(row[0], int):
        raise DamagedIndexError(f"{row!r} is no count")
    return row[0]
