"""Drafts that a second model computes, on the engine's thread, before the step that verifies them.

    ahead: what pays (draft_rounds) ──► the draft model takes in what it lacks, and drafts ──► begin ──► end: who was right

    NEW      nothing of the stream is in the draft model's pool
    BEHIND   some of its tokens are; a step takes in more, together with other streams at most `max_chunk_tokens`
    READY    all but a few are: drafts may follow in any step

A stream is taken in only where drafts are expected to save more than that takes. Its blocks are the draft model's own
(`draft_kv`). What counts is measured: T, what steps take by their rows, D, what those of the draft model take, and how often
its drafts were right. New streams are expected to be as the latest ones were. Where nothing pays, nothing is computed for
drafts but a few rows in every `RETRY`th step, to learn D anew. What was learned of chances is forgotten then, so drafts are
tried again if they could pay with better ones. What drafts cost beyond what they save is bounded, too.

Drafts are chosen with the stream's own noise and temperature, which finds what is sampled more often than the likeliest token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from configs.arithmetic import ceil_div
from decode_workers.speculation.acceptance import Acceptance
from decode_workers.speculation.draft_kv import DraftKv, ModelDrafts
from decode_workers.speculation.draft_rounds import Candidate, Round, best_round, is_worth_making_up
from decode_workers.speculation.drafts import DraftedStep
from decode_workers.speculation.row_costs import RowCosts
from decode_workers.speculation.speculator import Slots, Speculator, before_stop
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken
from engine.drafting.draft_model import Drafted, DraftRequest
from protocol.sampling import SamplingParams

RETRY = 1024
"""Steps without drafts after which they are tried again."""
READY_TOKENS = 8
"""Tokens that the draft model may lack of a stream that is drafted for: they are computed with the first draft."""
FIRST_CHANCE = 0.95
"""What drafts are expected to be before anything was seen. It is high, as without taking in nothing would be seen."""
_MISSING_THEN = 3
"""Tokens that the draft model lacks of a stream when it was taken in, a plain step later. If drafts paid only with fewer, it
would be taken in again and again for nothing."""
LOST_SHARE = 0.02
"""Part of the time that may be lost by drafts that do not pay."""
ALLOWED_STEPS = 32
"""What may be lost beyond that, in plain steps' times, before no stream is taken in: what that costs is saved only later."""
_MOST_LOST_STEPS = 2 * ALLOWED_STEPS
"""The most that one step adds to the loss, in plain steps' times. So a step that stalls does not keep streams out for long."""
_EXACT_ROWS = 32
"""Rows of the draft model up to which each number is timed apart; beyond, numbers up to a multiple of it are one."""

Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Has work done on the engine's thread."""
Tell = Callable[[str, Exception | None], None]
"""Takes what an operator should know, and the error that it comes from, if it does."""


class Drafter(Protocol):
    """The draft model: `engine.drafting.draft_model.DraftModel`."""

    name: str
    max_model_len: int
    num_blocks: int
    block_size: int

    def draft(self, requests: Sequence[DraftRequest]) -> Drafted:
        """Take in the tokens of all requests, and guess what follows."""

    def probe(self, block: int) -> Drafted:
        """Compute a row a few times in this block."""


@dataclass(frozen=True)
class _Place:
    """A stream of the step that could be drafted for, by its place in the batch."""

    place: int
    stream: Stream
    drafts: ModelDrafts
    candidate: Candidate

    @property
    def is_ready(self) -> bool:
        return self.candidate.missing <= READY_TOKENS


@dataclass
class _Job:
    """What the draft model computes ahead of one step."""

    places: Sequence[_Place] = ()
    requests: Sequence[DraftRequest] = ()
    drafted: Drafted | None = None
    """Set when it was computed."""
    error: Exception | None = None
    """Set when it could not be."""


class ModelSpeculator(Speculator):
    """Has a second model guess the tokens of one worker's steps."""

    def __init__(
        self,
        num_speculative_tokens: int,
        max_rows: int,
        slots: Slots,
        model: Drafter,
        run: Run,
        max_chunk_tokens: int,
        tell: Tell,
        *,
        joined: bool,
    ) -> None:
        """As `Speculator`. A step takes at most `max_chunk_tokens` into the draft model that streams are behind. `tell` is told
        once if drafts do not pay, and if the draft model fails.
        """
        super().__init__(num_speculative_tokens, max_rows, slots, joined=joined)
        self._model = model
        self._run = run
        self._max_chunk_tokens = max_chunk_tokens
        self._tell = tell
        self._is_told = False
        self.kv = DraftKv(model.num_blocks, model.block_size)
        self._draft_costs = RowCosts()
        """Times of the draft model's steps by their rows."""
        self._recent = _acceptance(FIRST_CHANCE)
        """What became of the drafts of all streams."""
        self._without = 0
        """Steps in a row in which no draft paid."""
        self._lost_s = 0.0
        """What drafts have cost more than they saved, but for the part of the time that may be lost."""
        self._failed = False
        """Whether the draft model has raised: then nothing is drafted any more."""
        self._job: _Job | None = None
        self._said: dict[int, tuple[ModelDrafts, Sequence[int]]] = {}
        """What was drafted for the step under way, by the stream's place in it."""

    def ahead(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> Awaitable[None] | None:
        """Choose what is drafted, and begin to compute it."""
        self._job, self.took_in = None, False
        num_rows, most = self._rows(chunks), self._max_rows - len(chunks)
        if most < 1 or self._failed or not self._costs.known:
            return None
        places = list(self._places(batch, chunks))
        if not places:
            return None
        if not self._draft_costs.known:
            return self._probe()
        if not self._beside_prompts and self._plain_is_due(num_rows):
            return None
        num_other = sum(len(chunk.token_ids) for chunk in chunks) - num_rows
        job = self._chosen(places, num_rows, most, num_other)
        self._without = 0 if any(request.num_drafts for request in job.requests) else self._without + 1
        if self._without >= RETRY:
            return self._try_again(places, num_rows)
        return self._compute(job, lambda: self._model.draft(job.requests)) if job.requests else None

    def problems(self, streams: Collection[Stream]) -> Iterator[str]:
        """What is wrong in the books of the draft model's pool."""
        holders = [stream.drafts for stream in streams if stream.drafts is not None]
        try:
            self.kv.check_integrity(holders)
        except AssertionError as error:
            yield str(error)

    def _guessed(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = [() for _ in chunks]
        self._said = {}
        if self._job is None:
            return drafts
        drafted = self._job.drafted
        if drafted is None:
            self._give_up(self._job.error)
            return drafts
        for rows, seconds in drafted.steps:
            self._draft_costs.note(_alike(rows), 0, seconds)
        for each, request, found in zip(self._job.places, self._job.requests, drafted.token_ids, strict=True):
            each.drafts.took_in(request.start + len(request.token_ids), found[:-1])
            if found:
                self._said[each.place] = each.drafts, found
                drafts[each.place] = before_stop(found, each.stream.sampling.stop_token_ids)
        return drafts

    def end(self, step: DraftedStep, results: Sequence[Sequence[SampledToken]], step_s: float) -> None:
        """As `Speculator`. Note also what drafts have cost and saved. Beside prompts that is not known."""
        super().end(step, results, step_s)
        drafted = None if self._job is None else self._job.drafted
        num_streams = sum(map(bool, results))
        if drafted is not None and num_streams and not self._beside_prompts:
            plain_s = self._costs.seconds(num_streams) * sum(map(len, results)) / num_streams
            lost_s = sum(seconds for _, seconds in drafted.steps) + step_s - plain_s
            self._lost_s += min(lost_s, _MOST_LOST_STEPS * self._costs.seconds(num_streams))
        self._lost_s = max(0.0, self._lost_s - LOST_SHARE * step_s)

    def _give_up(self, error: Exception | None) -> None:
        """Draft nothing any more, as the draft model has raised."""
        self._failed = True
        self.kv.release_all()
        self._tell(f"the draft model {self._model.name} fails, so this worker drafts no more", error)

    def _verified(self, place: int, tokens: Sequence[SampledToken], num_drafts: int) -> None:
        drafts, found = self._said.get(place, (None, ()))
        if drafts is None or not tokens:
            return
        if drafts.acceptance is None:
            drafts.acceptance = _acceptance(self._recent.chance)
        num_right = len(tokens) - 1
        if num_right == num_drafts < len(found):
            # The next draft was not verified, as it would end the answer or break its grammar. It is known what came instead.
            num_right, num_drafts = num_right + (tokens[-1].token_id == found[num_drafts]), num_drafts + 1
        drafts.acceptance.note(num_right, num_drafts)
        self._recent.note(num_right, num_drafts)

    def _places(self, batch: Sequence[Stream], chunks: Sequence[Chunk]) -> Iterator[_Place]:
        """Streams that could be drafted for, the oldest first."""
        for place, (stream, chunk) in enumerate(zip(batch, chunks, strict=True)):
            most = self._most(stream, chunk)
            within = self._model.max_model_len - len(stream.token_ids) + 1
            if most < 1:
                continue
            drafts = stream.drafts
            if within < 1:
                if drafts is not None:
                    drafts.release()
                continue
            if drafts is None:
                drafts = stream.drafts = ModelDrafts(self.kv)
            assert isinstance(drafts, ModelDrafts), "a worker guesses in one way"
            drafts.agree(stream.token_ids)
            chance = (drafts.acceptance or self._recent).chance
            candidate = Candidate(chance, min(most, within), len(stream.token_ids) - drafts.computed)
            yield _Place(place, stream, drafts, candidate)

    def _chosen(self, places: Sequence[_Place], num_rows: int, most: int, num_other: int) -> _Job:
        """What pays: drafts of those that are ready, and more tokens of others, where drafts will save the time.

        `num_other`: tokens of prompts that the step computes.
        """
        ready = [each for each in places if each.is_ready]
        verify_s, draft_s = self._costs.seconds, self._draft_costs.seconds
        found = best_round([each.candidate for each in ready], num_rows, most, verify_s, draft_s)
        beside = set() if found is None else {each.drafts for each, count in zip(ready, found.counts, strict=True) if count}
        chosen = [] if found is None else list(self._drafting(ready, found, beside))
        left = self._max_chunk_tokens - num_other - sum(len(request.token_ids) for _, request in chosen)
        may_lose = self._lost_s <= ALLOWED_STEPS * verify_s(num_rows)
        if len(ready) < len(places) and left > 0 and may_lose:
            all_ready = [replace(each.candidate, missing=_MISSING_THEN) for each in places]
            hoped = best_round(all_ready, num_rows, most, verify_s, draft_s)
            if hoped is not None:
                beside |= {each.drafts for each, count in zip(places, hoped.counts, strict=True) if count}
                chosen += self._making_up(places, hoped, left, beside)
        return _Job([each for each, _ in chosen], [request for _, request in chosen])

    def _drafting(
        self, ready: Sequence[_Place], found: Round, beside: Collection[ModelDrafts]
    ) -> Iterator[tuple[_Place, DraftRequest]]:
        for each, wanted in zip(ready, found.counts, strict=True):
            tokens = each.stream.token_ids
            if wanted and self.kv.reserve(each.drafts, len(tokens) + wanted - 1, beside):
                count = self._slots(each.stream, wanted)
                if count:
                    yield each, _request(each, len(tokens), count)

    def _making_up(
        self, places: Sequence[_Place], hoped: Round, left: int, beside: Collection[ModelDrafts]
    ) -> Iterator[tuple[_Place, DraftRequest]]:
        """At most `left` tokens of all of them."""
        saved_s = hoped.saved_s / hoped.num_streams
        token_s = self._draft_costs.seconds(self._max_chunk_tokens) / self._max_chunk_tokens
        for each, count in zip(places, hoped.counts, strict=True):
            if each.is_ready or not count or not left:
                continue
            sampling, tokens, chance = each.stream.sampling, each.stream.token_ids, each.candidate.chance
            per_step = 1 + sum(chance**i for i in range(1, count + 1))
            answer_left = sampling.max_tokens - each.stream.num_generated
            pays = is_worth_making_up(each.candidate.missing, answer_left, per_step, saved_s, token_s)
            if pays and self.kv.reserve(each.drafts, len(tokens) + self._most_drafts, beside):
                end = min(each.drafts.computed + left, len(tokens) - 1)
                left -= end - each.drafts.computed
                yield each, _request(each, end, 0)

    def _try_again(self, places: Sequence[_Place], num_rows: int) -> Awaitable[None] | None:
        self._without = 0
        if not self._is_told:
            told = f"{self._draft_costs.seconds(1) * 1e3:.1f} ms a step beside {self._costs.seconds(num_rows) * 1e3:.1f} ms"
            self._tell(f"the draft model {self._model.name} does not pay with {num_rows} streams: {told}", None)
            self._is_told = True
        self._recent = _acceptance(FIRST_CHANCE)
        for each in places:
            each.drafts.acceptance = None
        return self._probe()

    def _probe(self) -> Awaitable[None] | None:
        block = self.kv.unused_block()
        return None if block is None else self._compute(_Job(), lambda: self._model.probe(block))

    def _compute(self, job: _Job, compute: Callable[[], Drafted]) -> Awaitable[None]:
        def work() -> None:
            try:
                job.drafted = compute()
            except Exception as error:  # noqa: BLE001 - whatever it is: answers need no drafts
                job.error = error

        self._job = job
        self.took_in = not job.requests or not all(request.num_drafts for request in job.requests)
        return self._run(work)


def _acceptance(first_chance: float) -> Acceptance:
    """Drafts pay only where nearly all are right, so many have to be seen to tell: about the latest fifty count."""
    return Acceptance(first_chance, weight=10.0, fading=0.98)


def _request(each: _Place, end: int, count: int) -> DraftRequest:
    """Take in the tokens before `end`, and draft so many behind them."""
    start, stream = each.drafts.computed, each.stream
    return DraftRequest(
        token_ids=tuple(stream.token_ids[start:end]),
        start=start,
        block_table=tuple(each.drafts.blocks),
        num_drafts=count,
        sampling=_bare(stream.sampling),
        num_generated=stream.num_generated,
    )


def _bare(sampling: SamplingParams) -> SamplingParams:
    """Without what looks back, and what would be made for nobody."""
    return replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        num_logprobs=None,
        num_prompt_logprobs=None,
        grammar="",
    )


def _alike(num_rows: int) -> int:
    """The number of rows under which a step of the draft model is timed."""
    return num_rows if num_rows <= _EXACT_ROWS else ceil_div(num_rows, _EXACT_ROWS) * _EXACT_ROWS
