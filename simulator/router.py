"""A router in virtual time: the admission of a request and its way through the workers, around the router's own rules.

    arrive ──► line ──► front: ask decode workers in turn ──► claim ──► prefill ──► first token ──► attach ──► finished
                 ▲          │ no room                           └──► computed where it is decoded ──────────────────┘
                 └──────────┘ at the next change of any load, whoever is first then

`router.rules` decides who is first, which pair of workers it gets, and whether the decode worker computes the prompt. Nobody
dies here, and all requests are of one class, so nothing is resumed, copied or overtaken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import ClusterConfig
from protocol.errors import OverloadedError
from protocol.messages import LoadReport
from protocol.ticket import reserved_tokens
from router.rules.disaggregation import PrefillCosts
from router.rules.fair_queue import ANYBODY, Entry
from router.rules.line_rules import LEVELS_PER_QUEUE_TIME, LineRules
from router.rules.pair import DecodeQuestion, Pair, PairSearch
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad, blocks_for
from simulator.clock import Clock
from simulator.decode import DecodeWorker, Granted
from simulator.prefill import Job, PrefillWorker
from simulator.profile import Profile
from simulator.request import Request

_NO_ROOM = "no room in time"


@dataclass(eq=False)
class _Known:
    """A worker as this router knows it."""

    worker_id: str
    outstanding: Outstanding
    prompts: Outstanding
    report: LoadReport | None = None

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.worker_id, self.report, self.outstanding, self.prompts)


@dataclass(eq=False)
class _Waiting:
    """A request in line."""

    request: Request
    entry: Entry
    asks: PairRequest
    looking: bool = False
    """A decode worker is being asked."""
    late: bool = False
    """Its time was over meanwhile."""


@dataclass(frozen=True, eq=False)
class _Claim:
    """What a request holds at its workers, once it has left the line."""

    request: Request
    need_blocks: int
    pair: Pair
    granted: Granted
    decode: DecodeWorker
    computing: _Known
    waits: bool
    """Other prompts go before it where it is computed."""
    claimed_at: float


class Router:
    """One router. `on_end` is told of every request once, whether it was answered or refused."""

    def __init__(
        self,
        config: ClusterConfig,
        profile: Profile,
        clock: Clock,
        prefills: Sequence[PrefillWorker],
        decodes: Sequence[DecodeWorker],
        on_end: Callable[[Request], None],
    ) -> None:
        self.prefill_ranking, self.decode_ranking = PrefillRanking(), DecodeRanking()
        self.decisions: Counter[str] = Counter()
        """Prompts that were computed `here`, where they were decoded, and `there`, at a prefill worker."""
        self._config = config
        self._terms = PairTerms.of(config)
        self._measures = config.disaggregation == "auto"
        self._costs = PrefillCosts()
        self._overheads = profile.overheads
        self._clock = clock
        self._on_end = on_end
        self._line = LineRules(config.limits.max_waiting_requests, config.limits.queue_s / LEVELS_PER_QUEUE_TIME)
        self._waiting: dict[Entry, _Waiting] = {}
        self._parked: _Waiting | None = None
        """The request at the front, if it found no room: it looks again when something changes."""
        self._changes = 0
        self._prefills = {worker.worker_id: worker for worker in prefills}
        self._decodes = {worker.worker_id: worker for worker in decodes}
        self._known = {
            **{worker_id: self._know(worker_id, self.prefill_ranking) for worker_id in self._prefills},
            **{worker_id: self._know(worker_id, self.decode_ranking) for worker_id in self._decodes},
        }

    def arrive(self, request: Request) -> None:
        """Take a request that a client sends now."""
        decode, prefill = next(iter(self._decodes.values())), next(iter(self._prefills.values()), None)
        fits = decode.fits(len(request.token_ids), request.output_len)
        if fits and (prefill is None or prefill.fits(len(request.token_ids))):
            self._clock.after(self._overheads.request_s, self._enter, request)
        else:
            self._refuse(request, "larger than a worker's pool")

    def report(self, report: LoadReport) -> None:
        """Take a worker's load report."""
        known = self._known[report.worker_id]
        known.report = report
        known.outstanding.reported()
        if known.prompts is not known.outstanding:
            known.prompts.reported()
        self._note_change()

    def _know(self, worker_id: str, ranking: PrefillRanking | DecodeRanking) -> _Known:
        def changed() -> None:
            ranking.put(known.load())

        outstanding = Outstanding(on_change=changed)
        prompts = outstanding if ranking is self.prefill_ranking else Outstanding(on_change=changed)
        known = _Known(worker_id, outstanding, prompts)
        changed()
        return known

    # -- the line ----------------------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        now, queue_s = self._clock.now, self._config.limits.queue_s
        cost = reserved_tokens(len(request.token_ids), request.output_len, self._config.block_size)
        try:
            entry, leaving = self._line.enter(ANYBODY, cost, queue_s, now)
        except OverloadedError as error:
            self._refuse(request, error.message)
            return
        if leaving is not None:
            self._refuse(self._waiting.pop(leaving).request, _NO_ROOM)
        num_tokens, need_blocks = len(request.token_ids), blocks_for(cost, self._config.block_size)
        asks = PairRequest(num_tokens, num_tokens, need_blocks, ANYBODY.tenant)
        waiting = self._waiting[entry] = _Waiting(request, entry, asks)
        self._call()
        if entry in self._waiting:
            self._clock.at(now + queue_s, self._out_of_time, waiting)

    def _call(self) -> None:
        entry = self._line.call(self._clock.now)
        if entry is not None:
            self._look(self._waiting[entry])

    def _look(self, waiting: _Waiting) -> None:
        seen = self._changes
        self._ask(waiting, PairSearch(waiting.asks, self.prefill_ranking, self.decode_ranking, self._terms), seen)

    def _moment(self) -> Moment:
        costs = self._costs.lines(self._clock.now) if self._measures else None
        return Moment(costs, None, None, len(self._line), self._line.num_of)

    def _ask(self, waiting: _Waiting, search: PairSearch, seen: int) -> None:
        """Ask the next decode worker for blocks, if there is one."""
        question = search.next_decode(self._moment())
        if question is None:
            self._found_none(waiting, seen)
            return
        waiting.looking = True
        self._known[question.worker_id].outstanding.give(waiting.asks.need_blocks)
        self._clock.after(self._overheads.message_s, self._reserve, waiting, search, question, seen)

    def _reserve(self, waiting: _Waiting, search: PairSearch, question: DecodeQuestion, seen: int) -> None:
        """The question is at the worker."""
        request, message_s = waiting.request, self._overheads.message_s
        finished = (message_s, self._finished, request, question.worker_id, waiting.asks.need_blocks)
        granted = self._decodes[question.worker_id].reserve(
            request, lambda: self._clock.after(*finished), own_tokens=question.own_tokens
        )
        self._clock.after(message_s, self._answered, waiting, search, question, seen, granted)

    def _answered(
        self, waiting: _Waiting, search: PairSearch, question: DecodeQuestion, seen: int, granted: Granted | None
    ) -> None:
        """The worker's answer is here."""
        waiting.looking = False
        known, need_blocks = self._known[question.worker_id], waiting.asks.need_blocks
        if granted is None:
            known.outstanding.refuse(need_blocks)
            known.outstanding.done(need_blocks)
            self._ask(waiting, search, seen)
            return
        pair = search.pair(known.load(), granted.held_tokens, self._moment())
        if pair is None:
            self._clock.after(self._overheads.message_s, self._decodes[question.worker_id].release, granted.ticket_id)
            known.outstanding.done(need_blocks)
            self._ask(waiting, search, seen)
            return
        self._claimed(waiting, pair, granted)

    def _claimed(self, waiting: _Waiting, pair: Pair, granted: Granted) -> None:
        """The request has its pair: it leaves the line, and its prompt is sent."""
        request, computing = waiting.request, self._known[pair.computes]
        self.decisions["here" if pair.here else "there"] += 1
        waits = computing.load().queued_tokens > 0
        decode, need_blocks = self._decodes[pair.decode], waiting.asks.need_blocks
        claim = _Claim(request, need_blocks, pair, granted, decode, computing, waits, self._clock.now)
        computing.prompts.give_prompt(pair.num_missing, ANYBODY.tenant, ahead=pair.ahead)
        del self._waiting[waiting.entry]
        self._line.leave(waiting.entry, self._clock.now, served=True)
        self._clock.after(self._overheads.message_s, self._compute_here if pair.here else self._compute_there, claim)
        self._call()

    def _found_none(self, waiting: _Waiting, seen: int) -> None:
        if waiting.late:
            self._give_up(waiting)
        elif self._changes != seen:
            self._again(waiting)
        else:
            self._parked = waiting

    def _note_change(self) -> None:
        self._changes += 1
        waiting, self._parked = self._parked, None
        if waiting is not None:
            self._again(waiting)

    def _again(self, waiting: _Waiting) -> None:
        self._line.step_back(waiting.entry)
        self._call()

    def _out_of_time(self, waiting: _Waiting) -> None:
        if waiting.entry not in self._waiting:
            return
        if waiting.looking:
            waiting.late = True
        else:
            self._give_up(waiting)

    def _give_up(self, waiting: _Waiting) -> None:
        if self._parked is waiting:
            self._parked = None
        del self._waiting[waiting.entry]
        self._line.leave(waiting.entry, self._clock.now, served=False)
        self._refuse(waiting.request, _NO_ROOM)
        self._call()

    # -- with a claim ------------------------------------------------------------------------------------------------

    def _compute_there(self, claim: _Claim) -> None:
        """The prompt is at the prefill worker."""
        first = (self._overheads.message_s, self._first_token, claim)
        ticket_id = claim.granted.ticket_id
        job = Job(claim.request, lambda: self._clock.after(*first), lambda: claim.decode.commit(ticket_id))
        self._prefills[claim.pair.computes].prefill(job)

    def _compute_here(self, claim: _Claim) -> None:
        """The order to compute the prompt is at the decode worker, which ends the stream by itself."""
        first = (self._overheads.message_s, self._first_token, claim)
        claim.decode.attach_here(claim.granted.ticket_id, lambda: self._clock.after(*first))

    def _first_token(self, claim: _Claim) -> None:
        request, message_s, ticket_id = claim.request, self._overheads.message_s, claim.granted.ticket_id
        request.first_at = self._clock.now
        if not claim.pair.here and request.output_len > 1:
            attached = (message_s, self._attached, claim, self._clock.now)
            on_attached = (lambda: self._clock.after(*attached)) if self._measures else None
            self._clock.after(message_s, claim.decode.attach, ticket_id, on_attached)
        elif not claim.pair.here:
            self._clock.after(message_s, claim.decode.release, ticket_id)
            self._finished(request, claim.pair.decode, claim.need_blocks)
        if self._measures:
            self._measure_prefill(claim)
        claim.computing.prompts.prompt_done(claim.pair.num_missing, ANYBODY.tenant)
        self._note_change()

    def _measure_prefill(self, claim: _Claim) -> None:
        """Note what the prompt took, as a claim in the router does: without the wait for other prompts."""
        request, now = claim.request, self._clock.now
        prefill_s = now - self._overheads.message_s - request.prefill_began
        took_s = prefill_s if claim.waits else now - claim.claimed_at
        self._costs.prefilled(claim.pair.here, len(request.token_ids) - request.cached, took_s, now)

    def _attached(self, claim: _Claim, asked_at: float) -> None:
        """The decode worker has the KV and goes on; the answer to the question of `asked_at` is here."""
        now = self._clock.now
        self._costs.handed_over(len(claim.request.token_ids) - claim.granted.held_tokens, now - asked_at, now)

    def _finished(self, request: Request, decode_id: str, need_blocks: int) -> None:
        """The last token is here."""
        request.last_at = self._clock.now
        self._known[decode_id].outstanding.done(need_blocks)
        self._on_end(request)

    def _refuse(self, request: Request, error: str) -> None:
        request.error = error
        self._on_end(request)
