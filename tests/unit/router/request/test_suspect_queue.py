"""The line of suspected requests."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import UnavailableError
from router.request.suspect_queue import SuspectQueue


def test_suspects_run_one_at_a_time_and_others_pass() -> None:
    async def main() -> None:
        suspects = SuspectQueue()
        deadline = asyncio.get_running_loop().time() + 10
        said: list[str] = []

        async def suspect(name: str, end: asyncio.Event) -> None:
            async with suspects.turn(True, deadline) as cleared:
                said.append(name)
                await end.wait()
                cleared()
                await asyncio.sleep(0.01)

        ends = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(suspect(str(number), end)) for number, end in enumerate(ends)]
        async with suspects.turn(False, deadline):
            await asyncio.sleep(0)
        assert said == ["0"]
        tasks[1].cancel()
        ends[0].set()
        await asyncio.sleep(0.005)
        assert said == ["0", "2"], "a suspect that is cleared lets the next one in, and one that left is passed"
        soon = asyncio.get_running_loop().time() + 0.01
        with pytest.raises(UnavailableError, match="tried before"):
            async with suspects.turn(True, soon):
                raise AssertionError("two at a time")
        ends[2].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with suspects.turn(True, soon + 5):
            pass

    asyncio.run(main())
