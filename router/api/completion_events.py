"""How the answer of a chat or a plain completion is written: as server-sent events, or whole.

first piece of a choice ──► its opening, chunk, chunk ... ──► last chunk of the last choice, usage, [DONE]
                                                          └─► an error event, if an error ends the stream

Choices open in their order, whichever begins first: OpenAI's package can't follow a stream in which choice 2 comes before 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from dataclasses import replace

from protocol.errors import TandemError
from router.api.errors import error_body
from router.api.large.encoding import encoded
from router.api.server_sent_events import event
from router.api.shapes import ENTRY_SIZE, LARGE_ENTRIES, LARGE_SIZE, AnswerInfo, AnswerShape, Json, Offload
from router.dispatch.journal import NO_GUESSES, Guesses
from router.request.answer import Answer, Delta, num_entries
from telemetry.request_times import RequestTimes

_DONE = b"data: [DONE]\n\n"


class CompletionEvents:
    """Builds the events of one streamed completion; a router.api.server_sent_events.EventWriter."""

    def __init__(self, shape: AnswerShape, info: AnswerInfo) -> None:
        self._shape = shape
        self._info = info
        self._sparse = info.sparse
        self._num_opened = 0
        self._num_tokens = self._cached_tokens = 0
        self._guesses = NO_GUESSES
        self._times: dict[int, RequestTimes | None] = {}
        """The times of each choice that has ended."""
        self.ended = False
        """Whether every choice has got its finish reason."""

    def push(self, delta: Delta) -> bytes:
        """Return the events of the next piece, joined."""
        return b"".join(self.events(delta))

    def events(self, delta: Delta) -> list[bytes]:
        """Return the events of the next piece; those that end the stream follow the last choice's last piece."""
        self._num_tokens += len(delta.token_ids)
        self._cached_tokens += delta.cached_tokens
        self._guesses = Guesses.total((self._guesses, delta.guesses))
        large = num_entries(delta.logprobs) > LARGE_ENTRIES or self._num_prompt_ids(delta) > LARGE_SIZE
        events = [event(chunk, large=large) for chunk in self._counted([*self._openings(delta.index), *self._chunks(delta)])]
        if delta.finish_reason is not None:
            self._times[delta.index] = delta.times
            self.ended = len(self._times) == self._info.num_choices
        return events + self._ending() if self.ended else events

    def size(self, delta: Delta) -> int:
        """Return how long `push` will take, in characters that take as long to encode. Text of a few tokens counts nothing."""
        return ENTRY_SIZE * num_entries(delta.logprobs) + self._num_prompt_ids(delta)

    def fail(self, error: TandemError) -> bytes:
        """Return the event that tells of an error in the middle of a stream."""
        return event(error_body(error))

    def _num_prompt_ids(self, delta: Delta) -> int:
        """Number of token ids of prompts in the events of the next piece: each choice's first event has those of its prompt."""
        if not self._info.return_token_ids:
            return 0
        return self._shape.num_prompt_ids(range(self._num_opened, delta.index + 1), delta.index)

    def _openings(self, index: int) -> list[Json]:
        """Those up to this choice's that were not sent yet."""
        openings = [self._shape.opening(each) for each in range(self._num_opened, index + 1)]
        self._num_opened = max(self._num_opened, index + 1)
        return [opening for opening in openings if opening is not None]

    def _chunks(self, delta: Delta) -> list[Json]:
        """The chunks of one piece. A piece that says nothing yet has none, unless the client asked for each token."""
        if self._sparse and not (delta.text or delta.tool_calls or delta.finish_reason is not None):
            return []
        return [self._shape.chunk(piece) for piece in _ending_apart(delta)]

    def _counted(self, chunks: list[Json]) -> list[Json]:
        """The chunks with the counts so far, if the client asked for them in each."""
        if not self._info.continuous_usage:
            return chunks
        usage = self._usage([])["usage"]
        return [{**chunk, "usage": usage} for chunk in chunks]

    def _ending(self) -> list[bytes]:
        if not self._info.include_usage:
            return [_DONE]
        times = [self._times[index] for index in sorted(self._times)]
        return [event(self._usage(times)), _DONE]

    def _usage(self, times: Sequence[RequestTimes | None]) -> Json:
        return self._shape.usage_chunk(self._num_tokens, self._cached_tokens, times, self._guesses)


async def whole_completion(shape: AnswerShape, info: AnswerInfo, offload: Offload, deltas: AsyncIterable[Delta]) -> bytes:
    """Collect all pieces and return the answer as one JSON object, encoded."""
    pieces: list[list[Delta]] = [[] for _ in range(info.num_choices)]
    entries = size = 0
    async for delta in deltas:
        pieces[delta.index].append(delta)
        size += len(delta.token_ids) + len(delta.text)  # an echoed prompt has no tokens here
        entries += num_entries(delta.logprobs)
    if info.return_token_ids:  # those of its prompt with each choice
        size += info.choices_per_prompt * sum(map(len, info.prompts))
    large = entries > LARGE_ENTRIES or size > LARGE_SIZE
    return await offload(size + ENTRY_SIZE * entries, _whole, shape, pieces, large)


def _whole(shape: AnswerShape, pieces: Sequence[Sequence[Delta]], large: bool) -> bytes:
    return encoded(shape.whole([Answer.of(of_choice) for of_choice in pieces]), large=large)


def _ending_apart(delta: Delta) -> list[Delta]:
    """Split the finish reason from calls of tools that came with it, as OpenAI sends them: its package reads a chunk's finish
    reason before its calls, and would never tell that a call which begins there is done."""
    if delta.finish_reason is None or not delta.tool_calls:
        return [delta]
    end = replace(delta, text="", token_ids=(), logprobs=(), tool_calls=())
    return [replace(delta, finish_reason=None), end]
