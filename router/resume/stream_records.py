"""Records of resumable streams, kept outside of the routers that write them. Pure, with the interface to whoever keeps them.

    nothing ──number 0──► begun ──1, 2, 3 ...──► ended or left alone ──retention, or room for others──► nothing
                            └──take_over──► the same, of another owner ──┘

A record is a list of chunks: chunk 0 is the request, and each of the others is one piece of the answer. Only its owner
adds to it, and a router lets nothing out that was not added before. So whoever takes a record over knows all that its client
can have seen, and knows that nothing more will come from elsewhere: no router has to be known to be dead.

A stream may be silent for longer than records are retained, while it waits for another worker or is computed anew. So its owner
touches the record as long as the stream runs.

When there is no room, the tenant that has the most gives up the record that it has not touched for longest. So no tenant can
push out what another keeps within an equal share.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, Protocol

_CHUNK_BYTES = 100
"""About how much memory a chunk takes beside its own bytes."""
_SHARE = 8
"""One record may take at most this part of the room: an eighth."""


@dataclass(frozen=True)
class StreamKey:
    """Names a stream: its tenant, the path of its endpoint, and the request id that its client gave it."""

    tenant: str
    path: str
    request_id: str


@dataclass(frozen=True)
class Entry:
    """One chunk to be written into a record, by `owner`, who must be the record's owner."""

    key: StreamKey
    owner: str
    began: float
    """When the owner's request began, in seconds since 1970. Records outlive a head node, whose own clock begins anew."""
    number: int
    """The chunk's place in the record. Chunk 0 begins the record, also in place of that of a request which began earlier."""
    chunk: bytes


class WriteOutcome(Enum):
    """What became of an entry that was to be written."""

    KEPT = auto()
    LOST = auto()
    """The record is not there, or no longer: the stream goes on, and can't be resumed."""
    TAKEN = auto()
    """The record has another owner: this stream is to end."""


Taken = Literal[WriteOutcome.TAKEN]


class RecordStore(Protocol):
    """Keeps the records for all routers of a cluster. Any exception means that it is away."""

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        """Add the entries in this order, and return what became of each."""
        ...

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        """Retain the records of streams that run at their owners as if they were written now."""
        ...

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        """Make `owner`, whose request began at `began`, the owner of a record and return all its chunks.

        Returns TAKEN if a request that began later has it. Returns None if there is no such record, or if it holds fewer pieces
        than the client has seen.
        """
        ...

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        """Return what `take_over` would return to the newest request, and leave the record to its owner."""
        ...


@dataclass
class _Record:
    owner: str
    began: float
    touched: float
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


@dataclass
class _Shelf:
    """What one tenant keeps."""

    records: OrderedDict[StreamKey, _Record] = field(default_factory=OrderedDict)
    """In the order in which they were last touched."""
    num_bytes: int = 0


class StreamRecords:
    """Records of streams in memory, within bounds. `now` is any clock in seconds that never goes back.

    A record is forgotten `retention_s` after it was last touched, and earlier if others need its room.
    """

    def __init__(
        self, max_streams: int, max_bytes: int, retention_s: float, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`wall_clock` gives the seconds since 1970. A request that began later than that is taken for an old one."""
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._retention_s = retention_s
        self._wall_clock = wall_clock
        self._shelves: dict[str, _Shelf] = {}
        """By tenant; none is empty."""
        self._num_streams = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_streams

    @property
    def num_bytes(self) -> int:
        """Bytes that all records take together; never more than `max_bytes`."""
        return self._num_bytes

    def write(self, entries: Sequence[Entry], now: float) -> list[WriteOutcome]:
        """Add the entries in this order, and return what became of each."""
        self._forget_old(now)
        return [self._write(entry, now) for entry in entries]

    def touch(self, running: Sequence[tuple[StreamKey, str]], now: float) -> None:
        """Retain the records of streams that run at their owners as if they were written now."""
        self._forget_old(now)
        for key, owner in running:
            record = self._find(key)
            if record is not None and record.owner == owner:
                self._touch(key, record, now)

    def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int, now: float) -> list[bytes] | Taken | None:
        """Make `owner`, whose request began at `began`, the owner of a record and return all its chunks.

        Returns TAKEN if a request that began later has it: the client has come back elsewhere. Returns None if there is no such
        record, or if it holds fewer pieces than the client has seen (`num_seen`): then its keeper was away when the others were
        written.
        """
        chunks = self.read(key, num_seen, now)
        if chunks is None:
            return None
        record = self._shelves[key.tenant].records[key]
        if self._is_newer(record, began):
            return WriteOutcome.TAKEN
        record.owner, record.began = owner, began
        self._touch(key, record, now)
        return chunks

    def read(self, key: StreamKey, num_seen: int, now: float) -> list[bytes] | None:
        """Return what `take_over` would return to the newest request, and leave the record to its owner."""
        self._forget_old(now)
        record = self._find(key)
        return None if record is None or num_seen >= len(record.chunks) else list(record.chunks)

    def _write(self, entry: Entry, now: float) -> WriteOutcome:
        key = entry.key
        record = self._find(key)
        if entry.number == 0 and (record is None or not self._is_newer(record, entry.began)):
            self._forget(key)
            record = self._shelves.setdefault(key.tenant, _Shelf()).records[key] = _Record(entry.owner, entry.began, now)
            self._num_streams += 1
        if record is None:
            return WriteOutcome.LOST
        if record.owner != entry.owner:
            return WriteOutcome.TAKEN
        num_bytes = len(entry.chunk) + _CHUNK_BYTES
        if entry.number != len(record.chunks) or record.num_bytes + num_bytes > self._max_bytes // _SHARE:
            self._forget(key)  # one with a gap is worth nothing
            return WriteOutcome.LOST
        record.chunks.append(entry.chunk)
        self._grow(key, record, num_bytes)
        self._touch(key, record, now)
        self._make_room(key.tenant)
        return WriteOutcome.LOST if self._find(key) is None else WriteOutcome.KEPT

    def _is_newer(self, record: _Record, began: float) -> bool:
        """Whether the record's request came after one that began at `began`.

        The clocks of two routers may differ, and a clock may be set back. A record of the future is one of such a clock, and
        its client must not be told that somebody else has its stream.
        """
        return began < record.began <= self._wall_clock()

    def _make_room(self, writer: str) -> None:
        """Forget records until the bounds hold. Among tenants that have equally much, the `writer` gives up its own."""

        def amount(tenant: str) -> tuple[int, bool]:
            shelf = self._shelves[tenant]
            return (len(shelf.records) if self._num_streams > self._max_streams else shelf.num_bytes, tenant == writer)

        while self._num_streams > self._max_streams or self._num_bytes > self._max_bytes:
            most = max(self._shelves, key=amount)
            self._forget(next(iter(self._shelves[most].records)))

    def _find(self, key: StreamKey) -> _Record | None:
        shelf = self._shelves.get(key.tenant)
        return None if shelf is None else shelf.records.get(key)

    def _grow(self, key: StreamKey, record: _Record, num_bytes: int) -> None:
        record.num_bytes += num_bytes
        self._shelves[key.tenant].num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _touch(self, key: StreamKey, record: _Record, now: float) -> None:
        record.touched = now
        self._shelves[key.tenant].records.move_to_end(key)

    def _forget_old(self, now: float) -> None:
        for shelf in list(self._shelves.values()):
            while shelf.records:
                key, record = next(iter(shelf.records.items()))
                if now - record.touched <= self._retention_s:
                    break
                self._forget(key)

    def _forget(self, key: StreamKey) -> None:
        record = self._find(key)
        if record is None:
            return
        shelf = self._shelves[key.tenant]
        del shelf.records[key]
        self._grow(key, record, -record.num_bytes)
        self._num_streams -= 1
        if not shelf.records:
            del self._shelves[key.tenant]
