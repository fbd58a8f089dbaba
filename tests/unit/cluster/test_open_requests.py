"""When a cluster that ends has no requests left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from cluster import open_requests
from cluster.open_requests import OpenRequests


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario

    asyncio.run(bounded())


def number(routers: int) -> Callable[[], Awaitable[int]]:
    async def always() -> int:
        return routers

    return always


def test_every_router_has_to_tell_that_none_is_left() -> None:
    async def scenario() -> None:
        told = OpenRequests(number(2))
        waiting = asyncio.ensure_future(told.none_left(5.0))
        told.note("a", 0)
        await asyncio.sleep(0.3)
        assert not waiting.done(), "the other one may have some"
        told.note("b", 1)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        told.note("b", 0)
        assert await waiting == 0

    run(scenario())


def test_the_wait_ends_at_its_deadline() -> None:
    async def scenario() -> None:
        told = OpenRequests(number(1))
        told.note("a", 3)
        begun = time.monotonic()
        assert await told.none_left(0.3) == 3
        assert 0.3 <= time.monotonic() - begun < 2.0
        assert await told.none_left(0.0) == 3

    run(scenario())


def test_a_router_that_tells_nothing_any_more_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "_FRESH_S", 0.2)

    async def scenario() -> None:
        told = OpenRequests(number(1))
        told.note("killed", 7)
        await asyncio.sleep(0.3)
        told.note("its successor", 0)
        assert await told.none_left(5.0) == 0

    run(scenario())


def test_routers_that_come_and_go_meanwhile_count() -> None:
    num_routers = 2

    async def scenario() -> None:
        nonlocal num_routers

        async def at_the_moment() -> int:
            return num_routers

        told = OpenRequests(at_the_moment)
        waiting = asyncio.ensure_future(told.none_left(5.0))
        told.note("a", 0)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        num_routers = 1
        assert await waiting == 0

    run(scenario())


def test_what_is_told_while_the_routers_are_counted_counts() -> None:
    async def scenario() -> None:
        async def slowly() -> int:
            await asyncio.sleep(0.3)
            return 1

        told = OpenRequests(slowly)
        told.note("a", 0)
        waiting = asyncio.ensure_future(told.none_left(2.0))
        await asyncio.sleep(0.1)
        told.note("b", 3)
        assert await waiting == 3

    run(scenario())
