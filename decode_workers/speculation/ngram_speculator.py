"""Drafts that are looked up in what a stream said before.

    begin: look up drafts ──► how many pay (choosing) ──► the step's chunks      end: who was right, what the rows took

What a stream said before is looked through for what follows its latest tokens (`ngram_index`). Its index is built when it is
drafted for the first time here, from the tokens that it has, so streams that resume, come back or move need nothing else. It
ends with the stream. Streams for which nothing is drafted are watched all the same: what would have been their draft is
compared with what they say, in every step or, where it is hardly ever right, in every fourth.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation.acceptance import Acceptance
from decode_workers.speculation.choosing import draft_counts
from decode_workers.speculation.ngram_index import NgramIndex
from decode_workers.speculation.speculator import Slots, Speculator, StreamDrafts, before_stop
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken

TAKEN_IN = 4096
"""Tokens that a step takes into indices, about two milliseconds' work. Its oldest streams go first."""
SELDOM = 4
"""Steps after which a stream is looked up for whose drafts are hardly ever right."""
_HARDLY_EVER = 0.1


class NgramDrafts(StreamDrafts):
    """What is known of one stream's drafts."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self.index = NgramIndex(tokens, shortest, longest)
        self.acceptance = Acceptance()
        self.latest: Sequence[int] = ()
        """Looked up for the step under way."""

    def release(self) -> None:
        """Nothing is held but memory of its own."""


class NgramSpeculator(Speculator):
    """Guesses one worker's tokens by what followed the latest ones before."""

    def __init__(self, config: SpeculativeConfig, max_rows: int, slots: Slots, *, joined: bool) -> None:
        """As `Speculator`."""
        super().__init__(config.num_speculative_tokens, max_rows, slots, joined=joined)
        self._config = config
        self._watched: dict[int, NgramDrafts] = {}
        """Streams of the step under way for which something was looked up, by their place in it."""

    def _guessed(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> list[Sequence[int]]:
        self._watched = {}
        drafts: list[Sequence[int]] = [() for _ in chunks]
        num_rows = self._rows(chunks)
        most = self._max_rows - len(chunks)
        if most > 0:
            self._look_up(batch, chunks)
            if self._watched and (self._beside_prompts or not self._plain_is_due(num_rows)):
                self._choose(batch, drafts, num_rows, most)
        return drafts

    def _verified(self, place: int, tokens: Sequence[SampledToken], num_drafts: int) -> None:
        known = self._watched.get(place)
        if known is None:
            return
        if num_drafts:
            known.acceptance.note(len(tokens) - 1, num_drafts)
        elif tokens:
            known.acceptance.note(int(tokens[0].token_id == known.latest[0]), 1)

    def _look_up(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> None:
        config, left = self._config, TAKEN_IN
        for place, (stream, chunk) in enumerate(zip(batch, chunks, strict=True)):
            most = self._most(stream, chunk)
            if most < 1:
                continue
            known = stream.drafts
            if known is None:
                known = stream.drafts = NgramDrafts(stream.token_ids, config.prompt_lookup_min, config.prompt_lookup_max)
            assert isinstance(known, NgramDrafts), "a worker guesses in one way"
            if known.acceptance.chance < _HARDLY_EVER and (stream.ticket_id + stream.num_generated) % SELDOM:
                continue
            left -= known.index.take_in(left)
            known.latest = before_stop(known.index.draft(most), stream.sampling.stop_token_ids)
            if known.latest:
                self._watched[place] = known

    def _choose(self, batch: Sequence[Stream], drafts: list[Sequence[int]], num_rows: int, most: int) -> None:
        counts = draft_counts(
            [known.acceptance.chance for known in self._watched.values()],
            [len(known.latest) for known in self._watched.values()],
            num_rows,
            most,
            self._costs.seconds,
        )
        for (place, known), count in zip(self._watched.items(), counts, strict=True):
            if count:
                drafts[place] = known.latest[: self._slots(batch[place], count)]
