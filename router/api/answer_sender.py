"""Sends an answer, as server-sent events or whole, and stops the work when the client goes away.

first token ─┬─ an error ─────────────► its HTTP status
             └─ 200, events ... ─┬─ the last piece's events, end
                                 └─ an error ──► the events that tell of it, end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import TandemError
from router.api.outlet import Outlet
from router.api.server_sent_events import EventWriter
from router.api.shapes import Offload
from router.request.answer import Delta
from telemetry.logging import fields

log = logging.getLogger(__name__)

_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DROPPED_HEADER = "x-tandem-dropped-messages"
"""The header that says how many messages of a chat with `truncation: "auto"` were left out."""


class AnswerSender(Response):
    """Sends the pieces of one answer, and owns their generator, which it closes when the answer was sent, cut off or failed."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], num_dropped: int | None, client_s: float) -> None:
        """`num_dropped` is the value of DROPPED_HEADER; None leaves the header out.

        A client that takes less than `router.api.outlet.PART_BYTES` in `client_s` seconds is given up.
        """
        super().__init__()
        self._deltas = deltas
        self._client_s = client_s
        self._own_headers = {} if num_dropped is None else {DROPPED_HEADER: str(num_dropped)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until it is done, or the client disconnects or is given up.

        Raises TandemError if it fails before its first byte.
        """
        outlet = Outlet(send, self._client_s)
        answering = asyncio.ensure_future(self._work(scope, receive, outlet.send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving, outlet.given_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left, given_up = not answering.done(), outlet.given_up.done()
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            await outlet.close()
        if not left:
            answering.result()
        elif given_up:
            request_id = scope["state"]["request_id"]
            log.info("a client did not read its answer for %g s", self._client_s, extra=fields(request=request_id))
        else:
            leaving.result()  # an error in reading is not a client that leaves

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._deltas):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer. A TandemError before the first byte is left to the app, which makes it the status."""
        raise NotImplementedError


class EventSender(AnswerSender):
    """Sends an answer as server-sent events, as its `events` writer makes them."""

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        events: EventWriter,
        offload: Offload,
        num_dropped: int | None,
        client_s: float,
    ) -> None:
        super().__init__(deltas, num_dropped, client_s)
        self._events = events
        self._offload = offload

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        delta = await anext(self._deltas)  # an error up to here still chooses the status
        await self._start(send)
        try:
            data = await self._push(delta)
            while not self._events.ended:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._push(await anext(self._deltas))
        except TandemError as error:
            data = self._events.fail(error)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _push(self, delta: Delta) -> bytes:
        """The events of the next piece, made in a thread if there is much to write."""
        size = self._events.size(delta)
        return await self._offload(size, self._events.push, delta) if size else self._events.push(delta)

    async def _start(self, send: Send) -> None:
        """Send the head of the answer."""
        start = Response(media_type="text/event-stream", headers=_EVENT_HEADERS | self._own_headers)
        headers = [header for header in start.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class WholeSender(AnswerSender):
    """Sends an answer as one JSON object, which `collect` makes of all its pieces and encodes."""

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        collect: Callable[[AsyncIterable[Delta]], Awaitable[bytes]],
        num_dropped: int | None,
        client_s: float,
    ) -> None:
        super().__init__(deltas, num_dropped, client_s)
        self._collect = collect

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._collect(self._deltas)
        await Response(body, media_type="application/json", headers=self._own_headers)(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
