"""Drafts for the streams of a decode worker, step by step.

    begin: look up drafts ──► how many pay (choosing) ──► the step's chunks      end: who was right, what the rows took

What a stream said before is looked through for what follows its latest tokens (`ngram_index`). Its index is built when it is
drafted for the first time here, from the tokens that it has, so streams that resume, come back or move need nothing else. It
ends with the stream. Streams for which nothing is drafted are watched all the same: what would have been their draft is
compared with what they say, in every step or, where it is hardly ever right, in every fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation.acceptance import Acceptance
from decode_workers.speculation.choosing import draft_counts
from decode_workers.speculation.drafts import DraftedStep, drafted_step
from decode_workers.speculation.ngram_index import NgramIndex
from decode_workers.speculation.row_costs import RowCosts
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken

PLAIN_EVERY = 64
"""Steps after which one is computed without drafts, so that it is known what that takes."""
TAKEN_IN = 4096
"""Tokens that a step takes into indices, about two milliseconds' work. Its oldest streams go first."""
SELDOM = 4
"""Steps after which a stream is looked up for whose drafts are hardly ever right."""
_HARDLY_EVER = 0.1
_FADING = 0.9


class StreamDrafts:
    """Index and acceptance of one stream, from which its drafts come."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self.index = NgramIndex(tokens, shortest, longest)
        self.acceptance = Acceptance()
        self.latest: list[int] = []
        """Looked up for the step under way."""


class Speculator:
    """Guesses the tokens of one worker's steps. `begin` and `end` enclose each step."""

    def __init__(self, config: SpeculativeConfig, max_rows: int, slots: Callable[[Stream, int], int], *, joined: bool) -> None:
        """A step has at most `max_rows` rows besides prompts. `slots` gives a stream up to so many slots in the pool for
        drafts. `joined` as in `drafted_step`.
        """
        self._config = config
        self._max_rows = max_rows
        self._slots = slots
        self._joined = joined
        self._costs = RowCosts()
        self._watched: list[tuple[int, StreamDrafts]] = []
        """Streams of the step under way for which something was looked up, by their place in it."""
        self._beside_prompts = False
        """Whether the step under way computes several tokens of a prompt, or some of which nothing is sampled."""
        self.draft_tokens = self.accepted_tokens = 0
        """Since the start."""
        self.tokens_per_stream = 1.0
        """That a step says, lately."""

    def begin(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> DraftedStep:
        """Return what the step computes: these chunks of these streams, and drafts behind some of them."""
        self._watched = []
        drafts: list[list[int]] = [[] for _ in chunks]
        num_rows = sum(chunk.sampling is not None and len(chunk.token_ids) == 1 for chunk in chunks)
        self._beside_prompts = num_rows < len(chunks)
        most = self._max_rows - len(chunks)
        if most > 0:
            self._look_up(batch, chunks)
            if self._watched and (self._beside_prompts or not self._plain_is_due(num_rows)):
                self._choose(batch, drafts, num_rows, most)
        return drafted_step(chunks, drafts, joined=self._joined)

    def end(self, step: DraftedStep, results: Sequence[Sequence[SampledToken]], step_s: float) -> None:
        """Take note of a step's results. `step_s` is what it took, in seconds. Beside prompts that says nothing."""
        self.draft_tokens += step.num_drafts
        self.accepted_tokens += sum(len(tokens) - 1 for tokens, count in zip(results, step.counts, strict=True) if count)
        if num_streams := sum(map(bool, results)):
            self.tokens_per_stream = _FADING * self.tokens_per_stream + (1 - _FADING) * sum(map(len, results)) / num_streams
        if not self._beside_prompts:
            self._costs.note(len(step.chunks), len(step.counts), step_s)
        for place, known in self._watched:
            tokens, count = results[place], step.counts[place]
            if count:
                known.acceptance.note(len(tokens) - 1, count)
            elif tokens:
                known.acceptance.note(int(tokens[0].token_id == known.latest[0]), 1)

    def _look_up(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> None:
        config, left = self._config, TAKEN_IN
        for place, (stream, chunk) in enumerate(zip(batch, chunks, strict=True)):
            most = min(config.num_speculative_tokens, stream.sampling.max_tokens - stream.num_generated - 1)
            if most < 1 or not stream.complete or chunk.sampling is None or not stream.sampling.speculative_decoding:
                continue
            known = stream.drafts
            if known is None:
                known = stream.drafts = StreamDrafts(stream.token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
            if known.acceptance.chance < _HARDLY_EVER and (stream.ticket_id + stream.num_generated) % SELDOM:
                continue
            left -= known.index.take_in(left)
            known.latest = _before_stop(known.index.draft(most), stream.sampling.stop_token_ids)
            if known.latest:
                self._watched.append((place, known))

    def _plain_is_due(self, num_rows: int) -> bool:
        age = self._costs.plain_age(num_rows)
        return age is None or age >= PLAIN_EVERY

    def _choose(self, batch: Sequence[Stream], drafts: list[list[int]], num_rows: int, most: int) -> None:
        counts = draft_counts(
            [known.acceptance.chance for _, known in self._watched],
            [len(known.latest) for _, known in self._watched],
            num_rows,
            most,
            self._costs.seconds,
        )
        for (place, known), count in zip(self._watched, counts, strict=True):
            if count:
                drafts[place] = known.latest[: self._slots(batch[place], count)]


def _before_stop(drafted: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Without a token that would end the answer, and what follows it: nothing is sampled after that."""
    for place, token_id in enumerate(drafted):
        if token_id in stop_token_ids:
            return drafted[:place]
    return drafted
