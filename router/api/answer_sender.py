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
from dataclasses import replace

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protocol.errors import TandemError
from router.api.errors import error_body
from router.api.event_ids import EventIds
from router.api.heartbeat import with_heartbeats
from router.api.shapes import AnswerShape, Json
from router.request.answer import Answer, Delta
from telemetry.request_times import RequestTimes

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DROPPED_HEADER = "x-tandem-dropped-messages"
"""How many messages of a chat with `truncation: "auto"` were left out."""
_DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""No ends of lines for server-sent events, but for clients that split what they read as text, as `httpx` does."""


def event(value: Json) -> bytes:
    """One server-sent event."""
    text = _encode(value)
    return b"data: " + (text if text.isascii() else text.translate(_LINE_ENDS)).encode() + b"\n\n"


class GenerationResponse(Response):
    """Owns the generator of an answer: it is closed when this response is done, was cut off or failed."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], num_dropped: int | None) -> None:
        """`num_dropped`: see DROPPED_HEADER; None leaves it out."""
        super().__init__()
        self._deltas = deltas
        self._own_headers = {} if num_dropped is None else {DROPPED_HEADER: str(num_dropped)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._work(scope, receive, send))
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

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._deltas), with_heartbeats(send) as send_on:
            await self._answer(scope, receive, send_on)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer. A TandemError before the first byte is left to the app, which makes it the status."""
        raise NotImplementedError

    async def _send_whole(self, body: Json, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(body, headers=self._own_headers)(scope, receive, send)

    async def _start_events(self, send: Send) -> None:
        """The head of an answer of server-sent events."""
        start = Response(media_type="text/event-stream", headers=_HEADERS | self._own_headers)
        headers = [header for header in start.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class AnswerResponse(GenerationResponse):
    """An answer of the two completion endpoints."""

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        shape: AnswerShape,
        num_choices: int,
        num_dropped: int | None,
        *,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool,
        sparse: bool,
        ids: EventIds | None = None,
    ):
        """`continuous_usage` counts in every chunk what there is up to it. `sparse` leaves out chunks that say nothing (a
        character or a stop string that is still open). `ids`: of a stream that may be resumed, see there."""
        super().__init__(deltas, num_dropped)
        self._shape = shape
        self._num_choices = num_choices
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._sparse = sparse
        self._ids = ids

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_events(send)
        else:
            pieces: list[list[Delta]] = [[] for _ in range(self._num_choices)]
            async for delta in self._deltas:
                pieces[delta.index].append(delta)
            answers = [Answer.of(of_choice) for of_choice in pieces]
            await self._send_whole(self._shape.whole(answers), scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        delta = await anext(self._deltas)  # an error up to here still chooses the status
        await self._start_events(send)
        pending = b""
        begun: set[int] = set()
        num_tokens = cached_tokens = 0
        times: dict[int, RequestTimes | None] = {}
        try:
            while True:
                if self._ids is not None:
                    self._ids.next_piece()
                if delta.index not in begun:
                    begun.add(delta.index)
                    opening = self._shape.opening(delta.index)
                    pending += b"" if opening is None else self._event(opening)
                num_tokens += len(delta.token_ids)
                cached_tokens += delta.cached_tokens
                if delta.text or delta.tool_calls or delta.finish_reason is not None or not self._sparse:
                    for piece in _ending_apart(delta):
                        chunk = self._shape.chunk(piece)
                        if self._continuous_usage:
                            chunk["usage"] = self._shape.usage_chunk(num_tokens, cached_tokens, [])["usage"]
                        pending += self._event(chunk)
                if delta.finish_reason is not None:
                    times[delta.index] = delta.times
                if len(times) == self._num_choices:
                    break
                if pending:
                    await send({"type": "http.response.body", "body": pending, "more_body": True})
                    pending = b""
                delta = await anext(self._deltas)
            if self._include_usage:
                told = [times[index] for index in sorted(times)]
                pending += self._event(self._shape.usage_chunk(num_tokens, cached_tokens, told))
            pending += self._with_id(_DONE)
        except TandemError as error:
            pending = event(error_body(error))
        await send({"type": "http.response.body", "body": pending, "more_body": False})

    def _event(self, value: Json) -> bytes:
        return self._with_id(event(value))

    def _with_id(self, data: bytes) -> bytes:
        return data if self._ids is None else self._ids.add(data)


def _ending_apart(delta: Delta) -> list[Delta]:
    """The end in a chunk after the calls that came with it, as OpenAI sends it: its package reads a chunk's finish reason
    before its calls, and would never tell that a call which begins there is done."""
    if delta.finish_reason is None or not delta.tool_calls:
        return [delta]
    end = replace(delta, text="", token_ids=(), logprobs=(), tool_calls=())
    return [replace(delta, finish_reason=None), end]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
