"""What guesses tokens for the streams of a decode worker, step by step. One way to guess is chosen when the worker starts.

    ahead: what has to be computed first ──► begin: the step's chunks, drafts among them ──► end: who was right, what it took

`ngram_speculator` looks drafts up, which needs nothing ahead. `model_speculator` has a second model compute them. What is
common to both is here: learning what steps take by their rows, and counting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from decode_workers.speculation.drafts import DraftedStep, drafted_step
from decode_workers.speculation.row_costs import RowCosts
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken

PLAIN_EVERY = 64
"""Steps after which one is computed without drafts, so that it is known what that takes."""
_FADING = 0.9

Slots = Callable[[Stream, int], int]
"""Gives a stream up to so many slots in the pool for drafts."""


class StreamDrafts(ABC):
    """What is known for guessing one stream's tokens. It ends with the stream."""

    @abstractmethod
    def release(self) -> None:
        """The stream has left: give back what is held for it. Idempotent."""


class Speculator(ABC):
    """Guesses the tokens of one worker's steps. `ahead`, `begin` and `end` enclose each step."""

    def __init__(self, num_speculative_tokens: int, max_rows: int, slots: Slots, *, joined: bool) -> None:
        """A stream gets at most `num_speculative_tokens` drafts. A step has at most `max_rows` rows besides prompts.

        `joined` is that of `drafted_step`.
        """
        self._most_drafts = num_speculative_tokens
        self._max_rows = max_rows
        self._slots = slots
        self._joined = joined
        self._costs = RowCosts()
        """Times of the steps that verify, by their rows."""
        self._beside_prompts = False
        """Whether the step under way computes several tokens of a prompt, or some of which nothing is sampled."""
        self.took_in = False
        """Whether the step under way had tokens computed that are not drafts, so that it took longer than others."""
        self.draft_tokens = self.accepted_tokens = 0
        """Since the start."""
        self.tokens_per_stream = 1.0
        """That a step says, lately."""

    def ahead(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> Awaitable[None] | None:
        """Begin what has to be computed before the step of these chunks of these streams can begin; None: nothing has."""
        return None

    @abstractmethod
    def _guessed(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> list[Sequence[int]]:
        """The drafts for each stream; most have none."""

    @abstractmethod
    def _verified(self, place: int, tokens: Sequence[SampledToken], num_drafts: int) -> None:
        """Take note of what a step said of the stream in this place of the batch, and how many drafts it had."""

    def begin(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> DraftedStep:
        """Return what the step computes: these chunks of these streams, and drafts behind some of them."""
        return drafted_step(chunks, self._guessed(batch, chunks), joined=self._joined)

    def end(self, step: DraftedStep, results: Sequence[Sequence[SampledToken]], step_s: float) -> None:
        """Take note of a step's results. `step_s` is what it took, in seconds. Beside prompts that says nothing."""
        self.draft_tokens += step.num_drafts
        self.accepted_tokens += sum(len(tokens) - 1 for tokens, count in zip(results, step.counts, strict=True) if count)
        if num_streams := sum(map(bool, results)):
            self.tokens_per_stream = _FADING * self.tokens_per_stream + (1 - _FADING) * sum(map(len, results)) / num_streams
        if not self._beside_prompts:
            self._costs.note(len(step.chunks), len(step.counts), step_s)
        for place, (tokens, count) in enumerate(zip(results, step.counts, strict=True)):
            self._verified(place, tokens, count)

    def problems(self, streams: Collection[Stream]) -> Iterator[str]:
        """What is wrong in the books of what is held for these streams, which are all there are, in words for an audit."""
        yield from ()

    def _most(self, stream: Stream, chunk: Chunk) -> int:
        """Most drafts that the stream can have in this step."""
        if not stream.complete or chunk.sampling is None or not stream.sampling.speculative_decoding:
            return 0
        return max(0, min(self._most_drafts, stream.sampling.max_tokens - stream.num_generated - 1))

    def _rows(self, chunks: Sequence[Chunk]) -> int:
        """Rows of streams in this step. Whether there are others is noted."""
        num_rows = sum(chunk.sampling is not None and len(chunk.token_ids) == 1 for chunk in chunks)
        self._beside_prompts = num_rows < len(chunks)
        return num_rows

    def _plain_is_due(self, num_rows: int) -> bool:
        age = self._costs.plain_age(num_rows)
        return age is None or age >= PLAIN_EVERY


def before_stop(drafted: Sequence[int], stop_token_ids: Sequence[int]) -> Sequence[int]:
    """Return the drafts without a token that would end the answer, and what follows it: nothing is sampled after that."""
    for place, token_id in enumerate(drafted):
        if token_id in stop_token_ids:
            return drafted[:place]
    return drafted
