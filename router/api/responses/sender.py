"""Sends a response of /v1/responses, whole or as server-sent events, each under its name; there is no [DONE]."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from starlette.types import Receive, Scope, Send

from protocol.errors import TandemError
from router.api.answer_sender import GenerationResponse, event
from router.api.responses.events import ResponseBuilder
from router.api.shapes import Json
from router.request.answer import Delta


class ResponseSender(GenerationResponse):
    """As for chats, the first piece decides about the status: what fails before it is an HTTP error."""

    def __init__(
        self, deltas: AsyncGenerator[Delta, None], builder: ResponseBuilder, num_dropped: int | None, *, stream: bool
    ) -> None:
        super().__init__(deltas, num_dropped)
        self._builder = builder
        self._stream = stream

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_events(send)
            return
        async for delta in self._deltas:
            self._builder.push(delta)
        await self._send_whole(self._builder.response, scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        delta = await anext(self._deltas)
        await self._start_events(send)
        events = self._builder.begin()
        try:
            while True:
                events += self._builder.push(delta)
                if delta.finish_reason is not None:
                    break
                if events:
                    await send({"type": "http.response.body", "body": _named(events), "more_body": True})
                    events = []
                delta = await anext(self._deltas)
        except TandemError as error:
            events = self._builder.fail(error)
        await send({"type": "http.response.body", "body": _named(events), "more_body": False})


def _named(events: Iterable[Json]) -> bytes:
    return b"".join(b"event: " + each["type"].encode() + b"\n" + event(each) for each in events)
