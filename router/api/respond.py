"""Sends an answer: streamed as server-sent events or whole, and stops the work when the client goes away.

first token ─┬─ an error ─────────────► its HTTP status
             └─ 200, chunk, chunk ... ─┬─ usage, [DONE]
                                       └─ an error ──► an error event, end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protocol.errors import TandemError
from router.answer import Answer, Delta
from router.api.errors import error_body
from router.api.shapes import AnswerShape, Json

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value).encode() + b"\n\n"


class AnswerResponse(Response):
    """Owns the answer's generator: it is closed when this response is done, was cut off or failed."""

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        shape: AnswerShape,
        num_choices: int,
        *,
        stream: bool,
        include_usage: bool,
        sparse: bool,
    ):
        """`sparse` leaves out chunks without text (a character or a stop string that is still open)."""
        super().__init__()
        self._deltas = deltas
        self._shape = shape
        self._num_choices = num_choices
        self._stream = stream
        self._include_usage = include_usage
        self._sparse = sparse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not answering.done()
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not left:
            answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._deltas):
            if self._stream:
                await self._send_events(send)
            else:
                pieces: list[list[Delta]] = [[] for _ in range(self._num_choices)]
                async for delta in self._deltas:
                    pieces[delta.index].append(delta)
                answers = [Answer.of(of_choice) for of_choice in pieces]
                await JSONResponse(self._shape.whole(answers))(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        delta = await anext(self._deltas)  # an error up to here still chooses the status
        start = Response(media_type="text/event-stream", headers=_HEADERS)
        headers = [header for header in start.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pending = b""
        begun: set[int] = set()
        num_tokens = cached_tokens = num_finished = 0
        try:
            while True:
                if delta.index not in begun:
                    begun.add(delta.index)
                    opening = self._shape.opening(delta.index)
                    pending += b"" if opening is None else event(opening)
                num_tokens += len(delta.token_ids)
                cached_tokens += delta.cached_tokens
                if delta.text or delta.finish_reason is not None or not self._sparse:
                    pending += event(self._shape.chunk(delta))
                num_finished += delta.finish_reason is not None
                if num_finished == self._num_choices:
                    break
                if pending:
                    await send({"type": "http.response.body", "body": pending, "more_body": True})
                    pending = b""
                delta = await anext(self._deltas)
            if self._include_usage:
                pending += event(self._shape.usage_chunk(num_tokens, cached_tokens))
            pending += _DONE
        except TandemError as error:
            pending = event(error_body(error))
        await send({"type": "http.response.body", "body": pending, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
