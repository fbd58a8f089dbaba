"""Streams that a client may resume: the headers that ask for it, and what is recorded of a request.

x-tandem-resumable: true, x-request-id: R ──► events with ids          a new stream, also in place of an older R
last-event-id: 17.1,      x-request-id: R ──► the events after it      the rest of R, from whichever router
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import accumulate

from pydantic import TypeAdapter
from starlette.requests import Request

from protocol.errors import InvalidRequestError, TandemError
from router.api.completion_events import CompletionEvents
from router.api.shapes import AnswerInfo
from router.request.answer import Delta
from router.request.echo import Echo
from router.request.generation import Generation
from router.resume.event_ids import LAST_EVENT_HEADER, START, EventId, EventIds
from router.resume.stream_records import StreamKey

RESUMABLE_HEADER = "x-tandem-resumable"
_REQUEST_ID_HEADER = "x-request-id"
_LEAST_CHARACTERS, _LEAST_DISTINCT = 22, 8
"""Of an id that nobody guesses: 128 random bits are 22 characters in base64 and 32 in hex, of which a UUID repeats some."""


def is_resumable(request: Request) -> bool:
    """Return whether the client wants a stream that can be resumed. Raises InvalidRequestError for a wrong header."""
    wanted = request.headers.get(RESUMABLE_HEADER, "false")
    if wanted not in ("true", "false"):
        raise InvalidRequestError(f"`{RESUMABLE_HEADER}` must be true or false; got {wanted!r:.40}", param=RESUMABLE_HEADER)
    return wanted == "true"


def last_event_of(request: Request) -> EventId | None:
    """Return the id of the last event that a client has of the stream that it resumes; None if it resumes none.

    Raises InvalidRequestError for a header that is no such id.
    """
    given = request.headers.get(LAST_EVENT_HEADER)
    return None if given is None else EventId.parse(given)


def refuse_resumable(request: Request, why: str) -> None:
    """Raise InvalidRequestError if the request is about a stream that can be resumed."""
    if is_resumable(request):
        raise InvalidRequestError(f"`{RESUMABLE_HEADER}` must be false: {why}", param=RESUMABLE_HEADER)
    if last_event_of(request) is not None:
        raise InvalidRequestError(f"`{LAST_EVENT_HEADER}` can't be followed: {why}", param=LAST_EVENT_HEADER)


def stream_key(request: Request, tenant: str) -> StreamKey:
    """Return the key of the stream that a request of this tenant begins or resumes.

    Raises InvalidRequestError if the client has not named the stream by an `x-request-id`, which it has to know to come back.
    """
    request_id = request.scope["state"]["request_id"]
    if request.headers.get(_REQUEST_ID_HEADER) != request_id:
        raise InvalidRequestError(
            f"`{_REQUEST_ID_HEADER}` must name the stream, in 1 to 128 printable characters", param=_REQUEST_ID_HEADER
        )
    return StreamKey(tenant, request.url.path, request_id)


def check_hard_to_guess(key: StreamKey) -> None:
    """Raise InvalidRequestError if somebody else could guess the id of a stream.

    To be called where there are no API keys: the id is then all that keeps a stream from other clients.
    """
    if len(key.request_id) < _LEAST_CHARACTERS or len(set(key.request_id)) < _LEAST_DISTINCT:
        raise InvalidRequestError(
            f"`{_REQUEST_ID_HEADER}` must be hard to guess, such as a random UUID, for without API keys whoever knows it may "
            f"resume the stream: at least {_LEAST_CHARACTERS} characters, {_LEAST_DISTINCT} of them different",
            param=_REQUEST_ID_HEADER,
        )


class ResumableEvents:
    """Builds the events of a resumable stream, each with its id; a router.api.server_sent_events.EventWriter.

    Events up to the id that the client has `seen` are left out. An event that tells of an error has no id.
    """

    def __init__(self, events: CompletionEvents, seen: EventId = START) -> None:
        self._events = events
        self._ids = EventIds(seen)

    @property
    def ended(self) -> bool:
        """Whether every choice has got its finish reason."""
        return self._events.ended

    def push(self, delta: Delta) -> bytes:
        """Return the events of the next piece that the client has not seen."""
        self._ids.next_piece()
        return b"".join(self._ids.add(event) for event in self._events.events(delta))

    def size(self, delta: Delta) -> int:
        """Return how long `push` will take, in characters that take as long to encode. Text of a few tokens counts nothing."""
        return self._events.size(delta)

    def fail(self, error: TandemError) -> bytes:
        """Return the event that tells of an error in the middle of a stream."""
        return self._events.fail(error)


@dataclass(frozen=True)
class AnswerRequest:
    """All that decides an answer, as it is recorded: prompts, resolved sampling, and how the answer is written."""

    generations: tuple[Generation, ...]
    info: AnswerInfo

    @classmethod
    def load(cls, data: bytes) -> AnswerRequest:
        """Return the request that `dump` turned into these bytes."""
        written, _, packed = data.partition(b"\n")
        head, ids = _HEAD.validate_json(written), array("I", packed)
        ends = accumulate(own.num_tokens for own in head.prompts)
        generations = tuple(
            own.generation(head.shared, tuple(ids[end - own.num_tokens : end]))
            for own, end in zip(head.prompts, ends, strict=True)
        )
        return cls(generations, replace(head.info, prompts=tuple(each.prompt_token_ids for each in generations)))

    def dump(self) -> bytes:
        """Write the request: a line of JSON, then the token ids of all prompts as they lie in memory.

        As JSON, a long prompt would hold up the loop for tens of milliseconds, from a thread as well. So would a long
        `logit_bias` or grammar that is written again for each prompt: what prompts share is written once.
        """
        shared = replace(self.generations[0], prompt_token_ids=(), echo=None)
        head = _Head(shared, tuple(map(_Prompt.of, self.generations)), replace(self.info, prompts=()))
        packed = b"".join(array("I", each.prompt_token_ids).tobytes() for each in self.generations)
        return b"\n".join((_HEAD.dump_json(head), packed))


@dataclass(frozen=True)
class _Prompt:
    """How one prompt's generation differs from those of the request's other prompts, besides its token ids."""

    num_tokens: int
    seed: int
    max_tokens: int
    echo: Echo | None
    """Has no token ids: they are the prompt's."""

    @classmethod
    def of(cls, generation: Generation) -> _Prompt:
        """Return what this generation does not share with the others of its request."""
        sampling, echo = generation.sampling, generation.echo
        bare = None if echo is None else replace(echo, token_ids=())
        return cls(len(generation.prompt_token_ids), sampling.seed, sampling.max_tokens, bare)

    def generation(self, shared: Generation, token_ids: tuple[int, ...]) -> Generation:
        """Return the generation of this prompt; `shared` has what is the same for all prompts of the request."""
        sampling = replace(shared.sampling, seed=self.seed, max_tokens=self.max_tokens)
        echo = None if self.echo is None else replace(self.echo, token_ids=token_ids)
        return replace(shared, prompt_token_ids=token_ids, sampling=sampling, echo=echo)


@dataclass(frozen=True)
class _Head:
    """A request without its prompts' token ids."""

    shared: Generation
    prompts: tuple[_Prompt, ...]
    info: AnswerInfo


_HEAD = TypeAdapter(_Head)
