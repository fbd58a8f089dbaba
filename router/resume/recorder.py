"""Records the pieces of resumable streams, each before it is sent.

    piece ──► waits for the tick's end, or for the call under way ──► one call with all that wait ──► goes to its client

So however many such streams a router has, their keeper gets one call at a time. A stream whose record was lost, or whose keeper
is away, goes on without one.

Now and then one more call touches the records of all streams that run and have said nothing for a while. So these are not taken
for streams that were left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from protocol.endpoint import answer_within
from protocol.errors import StreamNotFoundError, StreamTakenError, UnavailableError
from router.request.answer import Delta, num_entries
from router.resume.stream_records import Entry, RecordStore, StreamKey, Taken, WriteOutcome

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Seconds that the keeper of the records has to answer."""
_LOOKS_IN_RETENTION = 4
"""Looks for silent streams in the time for which records are retained. A stream is touched after two looks at the latest."""
_DELTA = TypeAdapter(Delta)
_MOST_ENTRIES = 4096
"""Most tokens with logprobs, alternatives included, that a recorded piece may repeat of a prompt. Nothing else runs while it is
written, or later read: with 4,096 that took 4 and 30 ms (AMD EPYC, 2026-11-30)."""


@dataclass(eq=False)
class RecordWriter:
    """One stream's place in its record: what it has written and what it has still to write."""

    key: StreamKey
    owner: str
    began: float
    """Of the request that it writes for, in seconds since 1970: of two requests the newer one has the stream."""
    unwritten: list[bytes]
    num_written: int = 0
    num_noted: int = 0
    """What was written at the latest look for silent streams."""
    lost: bool = False


def _repeats_long_prompt(delta: Delta) -> bool:
    """Whether a piece repeats so many logprobs of its prompt that it is not recorded. They stand beside its own tokens'."""
    return len(delta.logprobs) > len(delta.token_ids) and num_entries(delta.logprobs) > _MOST_ENTRIES


def _taken() -> StreamTakenError:
    return StreamTakenError("another connection has taken over this stream", param="x-request-id")


def new_writer(key: StreamKey, request: bytes) -> RecordWriter:
    """Return the writer of a new record, whose chunk 0 is `request`.

    The record begins when the first piece is written, so a request that failed before leaves no record.
    """
    return RecordWriter(key, uuid.uuid4().hex, time.time(), [request])


@dataclass(frozen=True)
class TakenRecord:
    """A record that this router has taken over: the stream's request, its pieces so far, and the writer that goes on."""

    request: bytes
    """The request as it was given to `new_writer`."""
    deltas: Sequence[Delta]
    writer: RecordWriter


class Recorder:
    """Writes the records of all resumable streams of a router. Close it after them."""

    def __init__(self, store: RecordStore, retention_s: float) -> None:
        """Records are forgotten `retention_s` seconds after they were written or touched."""
        self._store = store
        self._look_s = retention_s / _LOOKS_IN_RETENTION
        self._running: set[RecordWriter] = set()
        self._touching: asyncio.Task[None] | None = None
        """Looks for silent streams. None if no stream has run since the latest look."""
        self._waiting: list[tuple[list[Entry], asyncio.Future[WriteOutcome]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Touch no more records, and wait for the write that is under way."""
        if self._touching is not None:
            self._touching.cancel()
            await asyncio.gather(self._touching, return_exceptions=True)
        if self._writing is not None:
            await self._writing

    async def take_over(self, key: StreamKey, began: float, num_seen: int) -> TakenRecord:
        """Take over the record of a stream of which the client has seen `num_seen` pieces. Its former writer finds it taken.

        `began` is when the request for it came, in seconds since 1970. Raises StreamTakenError if a newer request has it,
        StreamNotFoundError if there is no such record, and UnavailableError if the keeper of the records is away.
        """
        owner = uuid.uuid4().hex
        chunks = await self._known(self._store.take_over(key, owner, began, num_seen))
        writer = RecordWriter(key, owner, began, [], len(chunks))
        return TakenRecord(chunks[0], await asyncio.to_thread(_deltas, chunks), writer)

    async def read(self, key: StreamKey, num_seen: int) -> tuple[bytes, Sequence[Delta]]:
        """Return the request and the pieces so far of what `take_over` would take over, and leave it to its writer.

        Raises as `take_over`.
        """
        chunks = await self._known(self._store.read(key, num_seen))
        return chunks[0], await asyncio.to_thread(_deltas, chunks)

    async def recorded(self, writer: RecordWriter, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield each piece when it is on record. Raises StreamTakenError when another connection has taken it over."""
        with self._runs(writer):
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    if not writer.lost and _repeats_long_prompt(delta):
                        await self._give_up(writer)
                    elif not writer.lost:
                        # Times are moments on this router's clock.
                        writer.unwritten.append(_DELTA.dump_json(replace(delta, times=None), exclude_defaults=True))
                        await self._write(writer)
                    yield delta

    async def resumed(self, record: TakenRecord, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield the recorded pieces, then each piece of `rest` when it is on record.

        Raises StreamTakenError when another connection has taken over the record.
        """
        with self._runs(record.writer):
            async with contextlib.aclosing(self.recorded(record.writer, rest)) as more:
                for delta in record.deltas:
                    yield delta
                    await asyncio.sleep(0)  # a long answer is repeated without holding up others
                async for delta in more:
                    yield delta

    @contextlib.contextmanager
    def _runs(self, writer: RecordWriter) -> Iterator[None]:
        """Touch the record now and then while inside, once it has begun and unless it is written anyway."""
        self._running.add(writer)
        if self._touching is None:
            self._touching = asyncio.create_task(self._touch_silent())
        try:
            yield
        finally:
            self._running.discard(writer)

    async def _touch_silent(self) -> None:
        """Touch the records of silent streams until none runs."""
        await asyncio.sleep(self._look_s)
        while self._running:
            begun = [writer for writer in self._running if writer.num_written and not writer.lost]
            silent = [(writer.key, writer.owner) for writer in begun if writer.num_written == writer.num_noted]
            for writer in begun:
                writer.num_noted = writer.num_written
            if silent:
                try:
                    await answer_within(_PATIENCE_S, self._store.touch(silent))
                except Exception as error:  # noqa: BLE001 (whatever ails it, there is another look in time)
                    log.warning("silent streams may be forgotten: their keeper is away (%s)", type(error).__name__)
            await asyncio.sleep(self._look_s)
        self._touching = None

    async def _known(self, asked: Awaitable[list[bytes] | Taken | None]) -> list[bytes]:
        try:
            chunks = await answer_within(_PATIENCE_S, asked)
        except Exception as error:  # noqa: BLE001 (whatever ails it, the client may try again)
            log.warning("the keeper of streams is away (%s)", type(error).__name__)
            raise UnavailableError("the keeper of resumable streams is away") from None
        if chunks is None:
            raise StreamNotFoundError(
                "there is no such stream to resume, or no longer: `x-request-id` must be that of a stream which this caller "
                "began here with `x-tandem-resumable: true`, and which said something not long ago",
                param="x-request-id",
            )
        if chunks is WriteOutcome.TAKEN:
            raise _taken()
        return chunks

    async def _give_up(self, writer: RecordWriter) -> None:
        """Have the record forgotten, for the next piece is too long: to write it down would hold up all streams."""
        if writer.unwritten:
            await self._write(writer)  # the record of an earlier request of this name is over, too
        if not writer.lost:
            writer.num_written += 1  # one with a gap is worth nothing
            writer.unwritten.append(b"")
            await self._write(writer)

    async def _write(self, writer: RecordWriter) -> None:
        first = writer.num_written
        entries = [
            Entry(writer.key, writer.owner, writer.began, first + at, chunk) for at, chunk in enumerate(writer.unwritten)
        ]
        writer.num_written += len(entries)
        writer.unwritten = []
        written: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        outcome = await written
        writer.lost = outcome is WriteOutcome.LOST
        if outcome is WriteOutcome.TAKEN:
            raise _taken()

    async def _write_all(self) -> None:
        batch: list[tuple[list[Entry], asyncio.Future[WriteOutcome]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                outcomes = iter(await self._kept([entry for entries, _ in batch for entry in entries]))
                for entries, written in batch:
                    *_, outcome = (next(outcomes) for _ in entries)
                    _tell(written, outcome)
        finally:
            # Whatever ends it, no stream waits for ever, and the next piece begins it anew.
            self._writing, left = None, [*batch, *self._waiting]
            self._waiting = []
            for _, written in left:
                _tell(written, WriteOutcome.LOST)

    async def _kept(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        try:
            return await answer_within(_PATIENCE_S, self._store.write(entries))
        except Exception as error:  # noqa: BLE001 (whatever ails it, serving goes on without it)
            log.warning("streams can't be resumed: their keeper is away (%s)", type(error).__name__)
            return [WriteOutcome.LOST] * len(entries)


def _tell(written: asyncio.Future[WriteOutcome], outcome: WriteOutcome) -> None:
    """Tell the stream that waits what became of its entries; nothing if it waits no more, or has been told."""
    if not written.done():
        written.set_result(outcome)


def _deltas(chunks: Sequence[bytes]) -> list[Delta]:
    """The pieces of a record's chunks, the first of which is the request."""
    return [_DELTA.validate_json(chunk) for chunk in chunks[1:]]
