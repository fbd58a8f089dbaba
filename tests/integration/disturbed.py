"""The same requests twice, undisturbed and disturbed: their answers must be the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from benchmarks.lib.streams import Answered, Request


async def disturbed(
    cluster: Any, requests: Sequence[Request], disturb: Callable[[httpx.AsyncClient, list[Answered]], Awaitable[None]]
) -> list[Answered]:
    """All requests at once, undisturbed and then disturbed; the answers of the second time, which are those of the first."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        expected = await asyncio.gather(*(Answered(request).run(client) for request in requests))
        assert all(answer.failure is None for answer in expected), [answer.failure for answer in expected]
        answers = [Answered(request) for request in requests]
        async with asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(answer.run(client))
            await disturb(client, answers)
    assert all(answer.failure is None for answer in answers), [answer.failure for answer in answers]
    differences = [answer.differs(right) for answer, right in zip(answers, expected, strict=True)]
    assert not any(differences), differences
    return answers


def begun(answers: Sequence[Answered], events: int = 3) -> Callable[[], bool]:
    return lambda: all(len(answer.times) >= events for answer in answers)


async def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.01)
