"""A stream's writer: what the keeper of its record says, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from router.request.answer import Delta
from router.resume.recorder import Recorder, new_writer
from router.resume.stream_records import Entry, RecordStore, StreamKey, StreamRecords, WriteOutcome

_Answer = TypeVar("_Answer")
KEY = StreamKey("", "/v1/completions", "a")


class FromAnotherThread(RecordStore):
    """It answers a moment later, as Ray does: also while the loop is held."""

    def __init__(self) -> None:
        self.records = StreamRecords(10, 100_000, 60.0)

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        return await self._said(self.records.write(entries, time.monotonic()))

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | None:
        return await self._said(self.records.take_over(key, owner, began, num_seen, time.monotonic()))

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        return await self._said(self.records.read(key, num_seen, time.monotonic()))

    async def _said(self, answer: _Answer) -> _Answer:
        loop = asyncio.get_running_loop()
        said: asyncio.Future[_Answer] = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, (said.set_result, answer)).start()
        return await said


async def pieces(number: int) -> AsyncGenerator[Delta, None]:
    for token in range(number):
        yield Delta(0, "", (token,), (), None, 0)


def test_a_stream_stays_on_record_while_its_router_is_held() -> None:
    async def main() -> None:
        recorder, writer = Recorder(FromAnotherThread()), new_writer(KEY, b"request")
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, time.sleep, 1.2)
        said = [delta async for delta in recorder.recorded(writer, pieces(2))]
        assert not writer.lost
        loop.call_later(0.01, time.sleep, 1.2)
        assert (await recorder.read(KEY, 0))[1] == said
        await recorder.close()

    asyncio.run(main())
