"""A stream's writer: what the keeper of its record says, and when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import pytest

from protocol.errors import StreamTakenError
from router.request.answer import Delta, TextLogprob, TextLogprobs, TokenText
from router.resume.recorder import Recorder, RecordWriter, TakenRecord, new_writer
from router.resume.stream_records import Entry, RecordStore, StreamKey, StreamRecords, Taken, WriteOutcome
from tests.unit.simulated_time import run_in_simulated_time

_Answer = TypeVar("_Answer")
KEY = StreamKey("", "/v1/completions", "a")


class FromAnotherThread(RecordStore):
    """It answers a moment later, as Ray does: also while the loop is held."""

    def __init__(self) -> None:
        self.records = StreamRecords(10, 100_000, 60.0)

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        return await self._said(self.records.write(entries, time.monotonic()))

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        self.records.touch(running, time.monotonic())
        await self._said(None)

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        return await self._said(self.records.take_over(key, owner, began, num_seen, time.monotonic()))

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        return await self._said(self.records.read(key, num_seen, time.monotonic()))

    async def _said(self, answer: _Answer) -> _Answer:
        loop = asyncio.get_running_loop()
        said: asyncio.Future[_Answer] = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, (said.set_result, answer)).start()
        return await said


class ByTheLoop(RecordStore):
    """It answers at once, by the loop's clock."""

    def __init__(self, retention_s: float, max_bytes: int = 100_000) -> None:
        self.records = StreamRecords(10, max_bytes, retention_s)
        self.touched: list[int] = []
        """Number of records in each call."""

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        return self.records.write(entries, now())

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        self.touched.append(len(running))
        self.records.touch(running, now())

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        return self.records.take_over(key, owner, began, num_seen, now())

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        return self.records.read(key, num_seen, now())


def now() -> float:
    return asyncio.get_running_loop().time()


async def pieces(number: int) -> AsyncGenerator[Delta, None]:
    for token in range(number):
        yield Delta(0, "", (token,), (), None, 0)


def test_a_stream_stays_on_record_while_its_router_is_held() -> None:
    async def main() -> None:
        recorder, writer = Recorder(FromAnotherThread(), 60.0), new_writer(KEY, b"request")
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, time.sleep, 1.2)
        said = [delta async for delta in recorder.recorded(writer, pieces(2))]
        assert not writer.lost
        loop.call_later(0.01, time.sleep, 1.2)
        assert (await recorder.read(KEY, 0))[1] == said
        await recorder.close()

    asyncio.run(main())


async def at_times(*times: float) -> AsyncGenerator[Delta, None]:
    """Pieces that are there at these times."""
    for time_s in times:
        await asyncio.sleep(time_s - now())
        yield Delta(0, "", (7,), (), None, 0)


async def _take(deltas: AsyncGenerator[Delta, None], each_s: float = 0.0) -> int:
    """Take all pieces, each in so many seconds."""
    taken = 0
    async for _ in deltas:
        taken += 1
        await asyncio.sleep(each_s)
    return taken


def test_a_stream_that_runs_is_kept_however_long_it_is_silent() -> None:
    """It waits for a worker, and is computed anew there. Whether it runs on or was resumed makes no difference."""

    async def main() -> None:
        store = ByTheLoop(120.0)
        recorder, other = Recorder(store, 120.0), StreamKey("", "/v1/completions", "b")
        silent = asyncio.create_task(_take(recorder.recorded(new_writer(other, b"request"), at_times(1.0, 500.0))))
        assert store.records.write([Entry(KEY, "dead", 0.0, number, b"{}") for number in range(2)], 0.0)
        await asyncio.sleep(100.0)
        chunks = await store.take_over(KEY, "me", 100.0, 1)
        assert isinstance(chunks, list)
        writer = RecordWriter(KEY, "me", 100.0, [], len(chunks))
        rest = recorder.resumed(TakenRecord(b"request", [], writer), at_times(230.0, 470.0))
        assert await _take(rest) == 2
        assert not writer.lost
        assert len(await store.read(KEY, 3) or ()) == 4
        assert await silent == 2
        assert await store.read(other, 2) is not None
        assert max(store.touched) == 2, "one call for all"
        await asyncio.sleep(125.0)
        assert await store.read(other, 2) is None, "one that has ended is not kept"
        calls = len(store.touched)
        await asyncio.sleep(1000.0)
        assert len(store.touched) == calls
        await recorder.close()

    run_in_simulated_time(main())


def test_a_record_is_kept_while_it_is_repeated_to_a_slow_client() -> None:
    async def main() -> None:
        store = ByTheLoop(120.0)
        recorder, writer = Recorder(store, 120.0), RecordWriter(KEY, "me", 0.0, [], 5)
        store.records.write([Entry(KEY, "me", 0.0, number, b"{}") for number in range(5)], 0.0)
        repeated = [Delta(0, "", (7,), (), None, 0)] * 4
        taken = await _take(recorder.resumed(TakenRecord(b"request", repeated, writer), pieces(1)), each_s=50.0)
        assert taken == 5
        assert not writer.lost
        await recorder.close()

    run_in_simulated_time(main())


def test_streams_that_speak_are_not_touched() -> None:
    async def main() -> None:
        store = ByTheLoop(120.0)
        recorder = Recorder(store, 120.0)
        await _take(recorder.recorded(new_writer(KEY, b"request"), at_times(*range(1, 300, 10))))
        await recorder.close()
        assert store.touched == []

    run_in_simulated_time(main())


@pytest.mark.parametrize("first", [4096, 4097])
def test_a_stream_with_a_piece_that_is_too_long_to_write_down_has_no_record(first: int) -> None:
    """Nor has a stream of its name that came before. To read 100,000 logprobs held up a router for half a second."""

    async def main() -> None:
        store = ByTheLoop(120.0, 2**26)
        recorder, writer = Recorder(store, 120.0), new_writer(KEY, b"request")
        store.records.write([Entry(KEY, "before", 0.0, number, b"{}") for number in range(4)], 0.0)
        entry = TextLogprobs(TextLogprob(TokenText("a", (97,)), -1.0), ())

        async def echo() -> AsyncGenerator[Delta, None]:
            for number in (first, 4097):
                yield Delta(0, "a" * number, (), (entry,) * number, None, 0)
            yield Delta(0, "a", (7,), (), None, 0)

        said = recorder.recorded(writer, echo())
        await anext(said)
        assert writer.lost == (first == 4097)
        assert await _take(said) == 2
        assert writer.lost
        assert await store.read(KEY, 0) is None
        await recorder.close()

    run_in_simulated_time(main())


def test_an_answer_with_many_logprobs_keeps_its_record() -> None:
    """A slow client gets many tokens at once, and needs the record most."""

    async def main() -> None:
        recorder = Recorder(store := ByTheLoop(120.0, 2**26), 120.0)
        entry = TextLogprobs(TextLogprob(TokenText("a", (97,)), -1.0), (TextLogprob(TokenText("b", (98,)), -2.0),) * 20)

        async def answer() -> AsyncGenerator[Delta, None]:
            yield Delta(0, "a" * 250, (7,) * 250, (entry,) * 250, None, 0)

        assert await _take(recorder.recorded(writer := new_writer(KEY, b"request"), answer())) == 1
        assert not writer.lost
        kept = await store.read(KEY, 0)
        assert kept is not None
        assert len(kept) == 2
        await recorder.close()

    run_in_simulated_time(main())


def test_who_comes_too_late_is_told_that_another_has_the_stream() -> None:
    async def main() -> None:
        recorder = Recorder(store := ByTheLoop(120.0), 120.0)
        store.records.write([Entry(KEY, "newer", 20.0, 0, b"request")], 0.0)
        with pytest.raises(StreamTakenError):
            await recorder.take_over(KEY, 10.0, 0)
        await recorder.close()

    run_in_simulated_time(main())
