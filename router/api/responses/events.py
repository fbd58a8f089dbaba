"""How an answer of /v1/responses is written: as server-sent events, each under its name and without a [DONE], or whole."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from protocol.errors import TandemError
from router.api.responses.builder import ResponseBuilder
from router.api.server_sent_events import event
from router.api.shapes import Json
from router.request.answer import Delta


class ResponseEvents:
    """Builds the events of one streamed response; a router.api.server_sent_events.EventWriter."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._begun = False
        self.ended = False

    def push(self, delta: Delta) -> bytes:
        """Return the events of the next piece; those that begin the response come before the first piece's."""
        opening = [] if self._begun else self._builder.begin()
        self._begun = True
        self.ended = delta.finish_reason is not None
        return _named(opening + self._builder.push(delta))

    def fail(self, error: TandemError) -> bytes:
        """Return the event that tells that the response failed."""
        return _named(self._builder.fail(error))


async def whole_response(builder: ResponseBuilder, deltas: AsyncIterable[Delta]) -> Json:
    """Collect all pieces and return the response object."""
    async for delta in deltas:
        builder.push(delta)
    return builder.response


def _named(events: Iterable[Json]) -> bytes:
    return b"".join(b"event: " + each["type"].encode() + b"\n" + event(each) for each in events)
