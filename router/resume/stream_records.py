"""Records of resumable streams, kept outside of the routers that write them. Pure, with the interface to whoever keeps them.

    nothing ──number 0──► begun ──1, 2, 3 ...──► ended or left alone ──retention, or room for younger ones──► nothing
                            └──take_over──► the same, of another owner ──┘

A record is a list of chunks: chunk 0 is the request, and each of the others is one piece of the answer. Only its owner
adds to it, and a router lets nothing out that was not added before. So whoever takes a record over knows all that its client
can have seen, and knows that nothing more will come from elsewhere: no router has to be known to be dead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

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
    number: int
    """The chunk's place in the record. Chunk 0 begins the record, also in place of an earlier record of this key."""
    chunk: bytes


class WriteOutcome(Enum):
    """What became of an entry that was to be written."""

    KEPT = auto()
    LOST = auto()
    """The record is not there, or no longer: the stream goes on, and can't be resumed."""
    TAKEN = auto()
    """The record has another owner: this stream is to end."""


class RecordStore(Protocol):
    """Keeps the records for all routers of a cluster. Any exception means that it is away."""

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        """Add the entries in this order, and return what became of each."""
        ...

    async def take_over(self, key: StreamKey, owner: str, num_seen: int) -> list[bytes] | None:
        """Make `owner` the owner of a record and return all its chunks.

        Returns None if there is no such record, or if it holds fewer pieces than the client has seen.
        """
        ...


@dataclass
class _Record:
    owner: str
    touched: float
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class StreamRecords:
    """Records of streams in memory, within bounds. `now` is any clock in seconds that never goes back.

    A record is forgotten `retention_s` after it was last touched, and earlier if younger ones need its room.
    """

    def __init__(self, max_streams: int, max_bytes: int, retention_s: float) -> None:
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._retention_s = retention_s
        self._records: OrderedDict[StreamKey, _Record] = OrderedDict()
        """In the order in which they were last touched."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes that all records take together; never more than `max_bytes`."""
        return self._num_bytes

    def write(self, entries: Sequence[Entry], now: float) -> list[WriteOutcome]:
        """Add the entries in this order, and return what became of each."""
        self._forget_old(now)
        return [self._write(entry, now) for entry in entries]

    def take_over(self, key: StreamKey, owner: str, num_seen: int, now: float) -> list[bytes] | None:
        """Make `owner` the owner of a record and return all its chunks.

        Returns None if there is no such record, or if it holds fewer pieces than the client has seen (`num_seen`): then its
        keeper was away when the others were written.
        """
        self._forget_old(now)
        record = self._records.get(key)
        if record is None or num_seen >= len(record.chunks):
            return None
        record.owner = owner
        self._touch(key, record, now)
        return list(record.chunks)

    def _write(self, entry: Entry, now: float) -> WriteOutcome:
        if entry.number == 0:
            self._forget(entry.key)
            self._records[entry.key] = _Record(entry.owner, now)
        record = self._records.get(entry.key)
        if record is None:
            return WriteOutcome.LOST
        if record.owner != entry.owner:
            return WriteOutcome.TAKEN
        num_bytes = len(entry.chunk) + _CHUNK_BYTES
        if entry.number != len(record.chunks) or record.num_bytes + num_bytes > self._max_bytes // _SHARE:
            self._forget(entry.key)  # one with a gap is worth nothing
            return WriteOutcome.LOST
        record.chunks.append(entry.chunk)
        record.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._touch(entry.key, record, now)
        while len(self._records) > self._max_streams or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._records)))
        return WriteOutcome.KEPT

    def _touch(self, key: StreamKey, record: _Record, now: float) -> None:
        record.touched = now
        self._records.move_to_end(key)

    def _forget_old(self, now: float) -> None:
        while self._records and now - next(iter(self._records.values())).touched > self._retention_s:
            self._forget(next(iter(self._records)))

    def _forget(self, key: StreamKey) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._num_bytes -= record.num_bytes
