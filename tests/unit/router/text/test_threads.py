"""Threads for texts: tenants take turns, none has all threads, and what nobody waits for is not done."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from protocol.errors import UnavailableError
from router.request.answer import Delta
from router.request.choices import interleaved
from router.text.threads import TextThreads

DEADLINE_S = 10


class Jobs:
    """Work that notes its beginning and waits for leave to end."""

    def __init__(self) -> None:
        self.threads = TextThreads()
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def add(self, tenant: str, name: str) -> asyncio.Task[str]:
        def work() -> str:
            self.begun.append(name)
            assert self._may_end.acquire(timeout=DEADLINE_S)
            return name

        return asyncio.ensure_future(self.threads.run(tenant, work))

    def end(self, number: int) -> None:
        self._may_end.release(number)

    async def until_begun(self, number: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.begun) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def run(test: Callable[[Jobs], Awaitable[None]]) -> None:
    async def main() -> None:
        jobs = Jobs()
        try:
            await test(jobs)
        finally:
            jobs.end(100)
            jobs.threads.close()

    asyncio.run(main())


def test_another_tenant_finds_a_free_thread_and_then_every_other_turn() -> None:
    async def test(jobs: Jobs) -> None:
        flood = [jobs.add("flood", f"f{number}") for number in range(20)]
        await jobs.until_begun(2)
        first = jobs.add("other", "o0")
        await jobs.until_begun(3)
        assert sorted(jobs.begun) == ["f0", "f1", "o0"]
        others = [jobs.add("other", f"o{number}") for number in range(1, 4)]
        await asyncio.sleep(0)
        for number in range(4, 10):
            jobs.end(1)
            await jobs.until_begun(number)
        assert {"o1", "o2", "o3"} <= set(jobs.begun), "half of the turns"
        jobs.end(100)
        assert await asyncio.gather(first, *others) == ["o0", "o1", "o2", "o3"]
        assert await asyncio.gather(*flood) == [f"f{number}" for number in range(20)]
        assert [name for name in jobs.begun if name[0] == "f"] == [f"f{number}" for number in range(20)], "in order"

    run(test)


def test_who_left_takes_no_turn() -> None:
    async def test(jobs: Jobs) -> None:
        running = [jobs.add("a", name) for name in ("a0", "a1")]
        await jobs.until_begun(2)
        left, stays = jobs.add("a", "left"), jobs.add("a", "stays")
        await asyncio.sleep(0)
        for task in (left, running[0]):
            task.cancel()
        await asyncio.gather(left, running[0], return_exceptions=True)
        assert jobs.begun == ["a0", "a1"], "a thread can't be taken away from what runs"
        jobs.end(3)
        assert [await task for task in (running[1], stays)] == ["a1", "stays"]
        assert "left" not in jobs.begun

    run(test)


def test_errors_are_raised_where_the_work_was_asked_for() -> None:
    async def test(jobs: Jobs) -> None:
        def fail() -> None:
            raise ValueError("bad text")

        for _ in range(10):
            with pytest.raises(ValueError, match="bad text"):
                await jobs.threads.run("a", fail)
        assert await jobs.threads.offload("a", 10, str.upper, "short") == "SHORT"
        assert await jobs.threads.offload("a", 10**6, str.upper, "long") == "LONG"

    run(test)


def test_what_waits_when_they_are_closed_fails() -> None:
    async def main() -> None:
        jobs = Jobs()
        tasks = [jobs.add("a", str(number)) for number in range(5)]
        await jobs.until_begun(2)
        jobs.end(2)
        jobs.threads.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:2] == ["0", "1"]
        assert all(isinstance(result, UnavailableError) for result in results[2:])

    asyncio.run(main())


@pytest.mark.parametrize("num_choices", [1, 4])
def test_a_request_with_text_that_waits_when_they_are_closed_ends_with_an_error(num_choices: int) -> None:
    """One of several choices once waited for ever, and one alone ended without a word."""

    async def main() -> None:
        jobs = Jobs()
        running = [jobs.add("a", name) for name in ("a0", "a1")]
        await jobs.until_begun(2)

        async def choice(index: int) -> AsyncGenerator[Delta, None]:
            yield Delta(index, await jobs.threads.run("a", str, index), (), (), None, 0)

        async def request() -> None:
            async with contextlib.aclosing(interleaved(map(choice, range(num_choices)), num_choices)) as pieces:
                async for _ in pieces:
                    raise AssertionError("no thread was free")

        waiting = asyncio.create_task(request())
        while len(jobs.threads._waiting.get("a", ())) < num_choices:  # noqa: ASYNC110
            await asyncio.sleep(0)
        jobs.end(2)
        jobs.threads.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await asyncio.wait_for(waiting, DEADLINE_S)
        await asyncio.gather(*running)

    asyncio.run(main())
