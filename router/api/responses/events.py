"""How an answer of /v1/responses is written: as server-sent events, each under its name and without a [DONE], or whole."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from protocol.errors import TandemError
from router.api.large.encoding import encoded
from router.api.responses.builder import ResponseBuilder
from router.api.server_sent_events import event
from router.api.shapes import ENTRY_SIZE, LARGE_ENTRIES, Json, Offload
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
        large = self._builder.num_entries(delta) > LARGE_ENTRIES
        return _named(opening + self._builder.push(delta), large=large)

    def size(self, delta: Delta) -> int:
        """Return how long `push` will take, in characters that take as long to encode. Text of a few tokens counts nothing."""
        return ENTRY_SIZE * self._builder.num_entries(delta)

    def fail(self, error: TandemError) -> bytes:
        """Return the event that tells that the response failed."""
        return _named(self._builder.fail(error), large=False)


async def whole_response(builder: ResponseBuilder, offload: Offload, deltas: AsyncIterable[Delta]) -> bytes:
    """Collect all pieces and return the response object, encoded."""
    entries = tokens = 0
    async for delta in deltas:
        tokens += len(delta.token_ids)
        new = builder.num_entries(delta)
        entries += new
        await offload(ENTRY_SIZE * new, builder.push, delta)
    return await offload(tokens + ENTRY_SIZE * entries, _whole, builder, entries > LARGE_ENTRIES)


def _whole(builder: ResponseBuilder, large: bool) -> bytes:
    return encoded(builder.response, large=large)


def _named(events: Iterable[Json], *, large: bool) -> bytes:
    return b"".join(b"event: " + each["type"].encode() + b"\n" + event(each, large=large) for each in events)
