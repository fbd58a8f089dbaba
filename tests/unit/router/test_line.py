"""The waiting line: order, bounds, leaving early."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import OverloadedError
from router.line import WaitingLine


def test_first_come_first_served_and_resumed_go_ahead() -> None:
    async def main() -> None:
        line, order, gate = WaitingLine(10), [], asyncio.Event()

        async def one(name: str, ahead: bool) -> None:
            async with line.turn(deadline(), ahead=ahead):
                await gate.wait()
                order.append(name)

        names = [("a", False), ("b", False), ("r1", True), ("c", False), ("r2", True)]
        tasks = []
        for name, ahead in names:
            tasks.append(asyncio.create_task(one(name, ahead)))
            await asyncio.sleep(0)
        assert len(line) == 5
        gate.set()
        await asyncio.gather(*tasks)
        assert order == ["a", "r1", "r2", "b", "c"], "who is at the front stays, who resumes goes next"
        assert len(line) == 0

    asyncio.run(main())


def test_limit_and_deadline() -> None:
    async def main() -> None:
        line = WaitingLine(2)
        async with line.turn(deadline()):
            waiting = asyncio.create_task(wait_in(line, deadline(0.05)))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="2 requests are waiting") as refused:
                async with line.turn(deadline()):
                    pass
            assert refused.value.retry_after_s is not None
            assert refused.value.retry_after_s >= 1
            with pytest.raises(TimeoutError):
                await waiting
            assert len(line) == 1

    asyncio.run(main())


@settings(max_examples=60)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_leaving_never_blocks_those_behind(ahead: list[bool], random: object) -> None:
    async def main() -> None:
        line = WaitingLine(100)
        tasks = []
        for flag in ahead:
            tasks.append(asyncio.create_task(wait_in(line, deadline(), ahead=flag)))
            await asyncio.sleep(0)
        leavers = random.sample(tasks, k=len(tasks) // 2)  # type: ignore[attr-defined]
        for task in leavers:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(line) == 0
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(main())


async def wait_in(line: WaitingLine, until: float, *, ahead: bool = False) -> None:
    async with line.turn(until, ahead=ahead):
        await asyncio.sleep(0)


def deadline(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds
