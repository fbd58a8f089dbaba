"""Streams that a client may resume: the headers that ask for it, and what is recorded of a request.

x-tandem-resumable: true, x-request-id: R ──► events with ids          a new stream, also in place of an older R
last-event-id: 17.1,      x-request-id: R ──► the events after it      the rest of R, from whichever router
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from starlette.requests import Request

from protocol.errors import InvalidRequestError
from router.access.gate import caller_of
from router.api.answer_sender import AnswerResponse
from router.api.event_ids import LAST_EVENT_HEADER, EventId, EventIds
from router.api.prepare import Generation
from router.api.shapes import AnswerInfo, AnswerShape
from router.request.answer import Delta
from router.resume.stream_records import StreamKey

RESUMABLE_HEADER = "x-tandem-resumable"
_REQUEST_ID_HEADER = "x-request-id"


def is_resumable(request: Request) -> bool:
    """Whether a new stream shall be one that can be resumed. Raises InvalidRequestError."""
    wanted = request.headers.get(RESUMABLE_HEADER, "false")
    if wanted not in ("true", "false"):
        raise InvalidRequestError(f"`{RESUMABLE_HEADER}` must be true or false; got {wanted!r:.40}", param=RESUMABLE_HEADER)
    return wanted == "true"


def last_event_of(request: Request) -> EventId | None:
    """What the client has of the stream that it resumes; None if it begins a new one. Raises InvalidRequestError."""
    given = request.headers.get(LAST_EVENT_HEADER)
    return None if given is None else EventId.parse(given)


def refuse_resumable(request: Request, why: str) -> None:
    """Raise InvalidRequestError if the request is about a stream that can be resumed."""
    if is_resumable(request):
        raise InvalidRequestError(f"`{RESUMABLE_HEADER}` must be false: {why}", param=RESUMABLE_HEADER)
    if last_event_of(request) is not None:
        raise InvalidRequestError(f"`{LAST_EVENT_HEADER}` can't be followed: {why}", param=LAST_EVENT_HEADER)


def stream_key(request: Request) -> StreamKey:
    """Raises InvalidRequestError if the client has not given the stream an id, which it has to know to come back."""
    request_id = request.scope["state"]["request_id"]
    if request.headers.get(_REQUEST_ID_HEADER) != request_id:
        raise InvalidRequestError(
            f"`{_REQUEST_ID_HEADER}` must name the stream, in 1 to 128 printable characters", param=_REQUEST_ID_HEADER
        )
    return StreamKey(caller_of(request.scope).tenant, request.url.path, request_id)


@dataclass(frozen=True)
class AnswerRequest:
    """All that decides about an answer: prompts, resolved sampling, and how it is written."""

    generations: tuple[Generation, ...]
    info: AnswerInfo
    continuous_usage: bool
    sparse: bool

    @classmethod
    def load(cls, data: bytes) -> AnswerRequest:
        loaded = _ANSWER_REQUEST.validate_json(data)
        prompts = tuple(generation.prompt_token_ids for generation in loaded.generations)
        return replace(loaded, info=replace(loaded.info, prompts=prompts))

    def dump(self) -> bytes:
        """With the prompts in it once."""
        return _ANSWER_REQUEST.dump_json(replace(self, info=replace(self.info, prompts=())))

    def response(
        self, deltas: AsyncGenerator[Delta, None], shape: AnswerShape, ids: EventIds | None = None, *, stream: bool = True
    ) -> AnswerResponse:
        return AnswerResponse(
            deltas,
            shape,
            self.info.num_choices,
            self.generations[0].num_dropped,
            stream=stream,
            include_usage=self.info.include_usage,
            continuous_usage=self.continuous_usage,
            sparse=self.sparse,
            ids=ids,
        )


_ANSWER_REQUEST = TypeAdapter(AnswerRequest)
