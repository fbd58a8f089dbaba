"""Records what resumable streams say, before they say it.

    piece ──► waits for the tick's end, or for the call under way ──► one call with all that wait ──► goes to its client

So however many such streams a router has, their keeper gets one call at a time. A stream whose record was lost, or whose keeper
is away, goes on without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from protocol.errors import InvalidRequestError, StreamNotFoundError, UnavailableError
from router.request.answer import Delta
from router.resume.stream_records import Entry, Fate, RecordStore, StreamKey

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""What the keeper of the records gets to answer."""
_DELTA = TypeAdapter(Delta)


@dataclass
class Pen:
    """Held by one stream, for its record."""

    key: StreamKey
    owner: str
    unwritten: list[bytes]
    num_written: int = 0
    lost: bool = False


def new_pen(key: StreamKey, opening: bytes) -> Pen:
    """For a new record. It begins with the first piece that is written: a request that came to nothing leaves none."""
    return Pen(key, uuid.uuid4().hex, [opening])


@dataclass(frozen=True)
class Recorded:
    """A record that was taken over: what was asked, what was said, and the pen to go on with."""

    opening: bytes
    said: Sequence[Delta]
    pen: Pen


class Recorder:
    """Writes for all streams of a router; must be closed after them."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._waiting: list[tuple[list[Entry], asyncio.Future[Fate]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing

    async def take_over(self, key: StreamKey, num_seen: int) -> Recorded:
        """The record of a stream of which the client has `num_seen` pieces. Whoever was writing it finds it taken.

        Raises StreamNotFoundError, and UnavailableError if the keeper is away.
        """
        owner = uuid.uuid4().hex
        try:
            async with asyncio.timeout(_PATIENCE_S):
                chunks = await self._store.take_over(key, owner, num_seen)
        except Exception as error:  # noqa: BLE001 (whatever ails it, the client may try again)
            log.warning("the keeper of streams is away (%s)", type(error).__name__)
            raise UnavailableError("the keeper of resumable streams is away") from None
        if chunks is None:
            raise StreamNotFoundError(
                "there is no such stream to resume, or no longer: `x-request-id` must be that of a stream which this caller "
                "began here with `x-tandem-resumable: true`, and which said something not long ago",
                param="x-request-id",
            )
        said = await asyncio.to_thread(lambda: [_DELTA.validate_json(chunk) for chunk in chunks[1:]])
        return Recorded(chunks[0], said, Pen(key, owner, [], len(chunks)))

    async def recorded(self, pen: Pen, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The same pieces, each when it is on record. Raises InvalidRequestError when another connection has taken over."""
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if not pen.lost:
                    # Times are moments on this router's clock.
                    pen.unwritten.append(_DELTA.dump_json(replace(delta, times=None), exclude_defaults=True))
                    await self._write(pen)
                yield delta

    async def resumed(self, record: Recorded, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """What was said, and then the rest as it comes. Raises as `recorded`."""
        async with contextlib.aclosing(self.recorded(record.pen, rest)) as more:
            for delta in record.said:
                yield delta
                await asyncio.sleep(0)  # a long answer is repeated without holding up others
            async for delta in more:
                yield delta

    async def _write(self, pen: Pen) -> None:
        entries = [Entry(pen.key, pen.owner, pen.num_written + at, chunk) for at, chunk in enumerate(pen.unwritten)]
        pen.num_written += len(entries)
        pen.unwritten = []
        outcome: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, outcome))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        fate = await outcome
        pen.lost = fate is Fate.LOST
        if fate is Fate.TAKEN:
            raise InvalidRequestError("another connection has taken over this stream", param="x-request-id")

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            fates = iter(await self._kept([entry for entries, _ in batch for entry in entries]))
            for entries, outcome in batch:
                *_, fate = (next(fates) for _ in entries)
                if not outcome.done():
                    outcome.set_result(fate)
        self._writing = None

    async def _kept(self, entries: Sequence[Entry]) -> list[Fate]:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._store.write(entries)
        except Exception as error:  # noqa: BLE001 (whatever ails it, serving goes on without it)
            log.warning("streams can't be resumed: their keeper is away (%s)", type(error).__name__)
            return [Fate.LOST] * len(entries)
