"""Bodies that come after the answer has begun, and who gets their last part."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.api.unread_bodies import DROP_S, UnreadBodies
from tests.unit.simulated_time import run_in_simulated_time


@pytest.mark.parametrize("num_parts", [0, 1, 2, 3])
def test_an_answer_waits_for_the_end_of_the_body_whoever_gets_it(num_parts: int) -> None:
    """The application may receive at the same time, to hear that its client leaves. Parts go to both in turns."""
    sent: list[tuple[float, Any]] = []

    async def scenario() -> None:
        parts: asyncio.Queue[Any] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def send(message: Any) -> None:
            sent.append((clock(), message["headers"]))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def left() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass

            leaving = asyncio.create_task(left())
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "headers": []})
            leaving.cancel()

        async def client() -> None:
            for left in reversed(range(num_parts)):
                await asyncio.sleep(0.1)
                parts.put_nowait({"type": "http.request", "body": b"x", "more_body": left > 0})

        scope: Any = {"type": "http", "headers": [(b"content-length", b"9")]}
        await asyncio.gather(client(), UnreadBodies(app)(scope, parts.get, send))

    run_in_simulated_time(scenario())
    closes = [] if num_parts else [(b"connection", b"close")]
    [(at, headers)] = sent
    assert at == pytest.approx(0.1 * num_parts or DROP_S)
    assert headers == closes
