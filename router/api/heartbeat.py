"""Sends comments into a stream of server-sent events while nothing is said, so that nobody on the way takes it for dead.

    head of an event stream ──► events ... ──quiet for QUIET_S──► ": waiting" ──► events ... ──► last event

A stream is quiet when its worker was lost and another one starts. Clients skip comments (WHATWG HTML, 9.2.5).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Send

QUIET_S = 5.0
"""Seconds without an event after which a comment is sent."""
_COMMENT = b": waiting\n\n"


class _Heart:
    """Passes messages on, one at a time; beats between the head of an event stream and its last event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._order = asyncio.Lock()
        self._sent_at = 0.0
        self.beating: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]):
                self.beating = asyncio.create_task(self._beat())
        elif not message.get("more_body") and self.beating is not None:
            self.beating.cancel()
        async with self._order:
            await self._send(message)
        self._sent_at = time.monotonic()

    async def _beat(self) -> None:
        self._sent_at = time.monotonic()
        while True:
            await asyncio.sleep(self._sent_at + QUIET_S - time.monotonic())
            if time.monotonic() - self._sent_at >= QUIET_S and not self._order.locked():
                await self.send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


@asynccontextmanager
async def with_heartbeats(send: Send) -> AsyncIterator[Send]:
    """Yield a `send` for one HTTP answer that fills the pauses of an event stream with comments."""
    heart = _Heart(send)
    try:
        yield heart.send
    finally:
        if heart.beating is not None:
            heart.beating.cancel()
            await asyncio.gather(heart.beating, return_exceptions=True)
