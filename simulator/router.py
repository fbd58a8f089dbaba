"""A router in virtual time: the pipeline and the admission of a request around the real rankings, books and rules of the line.

    arrive ──► line ──► front: ask decode workers in turn ──► claim ──► prefill ──► first token ──► attach ──► finished
                 ▲          │ no room
                 └──────────┘ at the next change of any load, whoever is first then

Nobody dies here, and every request has the same scheduling class, so nothing is resumed and nobody is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import ClusterConfig
from protocol.errors import OverloadedError
from protocol.messages import LoadReport
from protocol.ticket import reserved_tokens
from router.rules.fair_queue import ANYBODY, Entry
from router.rules.line_rules import LEVELS_PER_QUEUE_TIME, LineRules
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad, blocks_for, prefill_window
from simulator.clock import Clock
from simulator.decode import DecodeWorker
from simulator.prefill import Job, PrefillWorker
from simulator.profile import Profile
from simulator.request import Request

_NO_ROOM = "no room in time"


@dataclass(eq=False)
class _Known:
    """A worker as this router knows it."""

    worker_id: str
    outstanding: Outstanding
    report: LoadReport | None = None

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.worker_id, self.report, self.outstanding)


@dataclass(eq=False)
class _Waiting:
    """A request in line."""

    request: Request
    entry: Entry
    need_blocks: int
    looking: bool = False
    """A decode worker is being asked."""
    late: bool = False
    """Its time was over meanwhile."""


class Router:
    """`on_end` is told of every request once, whether it was answered or refused."""

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
        self._config = config
        self._overheads = profile.overheads
        self._clock = clock
        self._on_end = on_end
        self._line = LineRules(config.limits.max_waiting_requests, config.limits.queue_s / LEVELS_PER_QUEUE_TIME)
        self._waiting: dict[Entry, _Waiting] = {}
        self._parked: _Waiting | None = None
        """At the front, until something changes."""
        self._changes = 0
        self._prefills = {worker.worker_id: worker for worker in prefills}
        self._decodes = {worker.worker_id: worker for worker in decodes}
        self._known = {
            **{worker_id: self._know(worker_id, self.prefill_ranking) for worker_id in self._prefills},
            **{worker_id: self._know(worker_id, self.decode_ranking) for worker_id in self._decodes},
        }

    def arrive(self, request: Request) -> None:
        """A client sends this now."""
        prefill, decode = next(iter(self._prefills.values())), next(iter(self._decodes.values()))
        if prefill.fits(len(request.token_ids)) and decode.fits(len(request.token_ids), request.output_len):
            self._clock.after(self._overheads.request_s, self._enter, request)
        else:
            self._refuse(request, "larger than a worker's pool")

    def report(self, report: LoadReport) -> None:
        """A worker tells its load."""
        known = self._known[report.worker_id]
        known.report = report
        known.outstanding.reported()
        self._note_change()

    def _know(self, worker_id: str, ranking: PrefillRanking | DecodeRanking) -> _Known:
        known = _Known(worker_id, Outstanding(on_change=lambda: ranking.put(known.load())))
        ranking.put(known.load())
        return known

    # -- the line ----------------------------------------------------------------------------------------------------

    def _enter(self, request: Request) -> None:
        now, queue_s = self._clock.now, self._config.limits.queue_s
        cost = reserved_tokens(len(request.token_ids), request.output_len, self._config.answer_room)
        try:
            entry, leaving = self._line.enter(ANYBODY, cost, queue_s, now)
        except OverloadedError as error:
            self._refuse(request, error.message)
            return
        if leaving is not None:
            self._refuse(self._waiting.pop(leaving).request, _NO_ROOM)
        waiting = self._waiting[entry] = _Waiting(request, entry, blocks_for(cost, self._config.block_size))
        self._call()
        if entry in self._waiting:
            self._clock.at(now + queue_s, self._out_of_time, waiting)

    def _call(self) -> None:
        entry = self._line.call(self._clock.now)
        if entry is not None:
            self._look(self._waiting[entry])

    def _look(self, waiting: _Waiting) -> None:
        seen = self._changes
        self._ask(waiting, self.decode_ranking.order(waiting.need_blocks), 0, seen)

    def _ask(self, waiting: _Waiting, order: Sequence[str], number: int, seen: int) -> None:
        """Ask the decode worker of this number, if there is one and a prefill worker to go with it."""
        if number == len(order) or self._best_prefill(waiting.request) is None:
            self._found_none(waiting, seen)
            return
        waiting.looking = True
        self._known[order[number]].outstanding.give(waiting.need_blocks)
        self._clock.after(self._overheads.message_s, self._reserve, waiting, order, number, seen)

    def _reserve(self, waiting: _Waiting, order: Sequence[str], number: int, seen: int) -> None:
        """The question is at the worker."""
        decode_id, request = order[number], waiting.request
        finished = (self._overheads.message_s, self._finished, request, decode_id, waiting.need_blocks)
        ticket_id = self._decodes[decode_id].reserve(request, lambda: self._clock.after(*finished))
        self._clock.after(self._overheads.message_s, self._answered, waiting, order, number, seen, ticket_id)

    def _answered(self, waiting: _Waiting, order: Sequence[str], number: int, seen: int, ticket_id: int | None) -> None:
        decode_id, request = order[number], waiting.request
        waiting.looking = False
        outstanding = self._known[decode_id].outstanding
        if ticket_id is None:
            outstanding.refuse(waiting.need_blocks)
            outstanding.done(waiting.need_blocks)
            self._ask(waiting, order, number + 1, seen)
            return
        prefill_id = self._best_prefill(request)
        if prefill_id is None:
            self._clock.after(self._overheads.message_s, self._decodes[decode_id].release, ticket_id)
            outstanding.done(waiting.need_blocks)
            self._found_none(waiting, seen)
            return
        self._known[prefill_id].outstanding.give_prompt(len(request.token_ids), ANYBODY.tenant, ahead=False)
        del self._waiting[waiting.entry]
        self._line.leave(waiting.entry, self._clock.now, served=True)
        self._clock.after(self._overheads.message_s, self._prefill, waiting, prefill_id, decode_id, ticket_id)
        self._call()

    def _best_prefill(self, request: Request) -> str | None:
        return self.prefill_ranking.best(len(request.token_ids), prefill_window(self._config))

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

    def _prefill(self, waiting: _Waiting, prefill_id: str, decode_id: str, ticket_id: int) -> None:
        """The prompt is at the worker."""
        decode = self._decodes[decode_id]
        first = (self._overheads.message_s, self._first_token, waiting, prefill_id, decode_id, ticket_id)
        job = Job(waiting.request, lambda: self._clock.after(*first), lambda: decode.commit(ticket_id))
        self._prefills[prefill_id].prefill(job)

    def _first_token(self, waiting: _Waiting, prefill_id: str, decode_id: str, ticket_id: int) -> None:
        request, decode = waiting.request, self._decodes[decode_id]
        request.first_at = self._clock.now
        if request.output_len > 1:
            self._clock.after(self._overheads.message_s, decode.attach, ticket_id)
        else:
            self._clock.after(self._overheads.message_s, decode.release, ticket_id)
            self._finished(request, decode_id, waiting.need_blocks)
        self._known[prefill_id].outstanding.prompt_done(len(request.token_ids), ANYBODY.tenant)
        self._note_change()

    def _finished(self, request: Request, decode_id: str, need_blocks: int) -> None:
        """The last token is here."""
        request.last_at = self._clock.now
        self._known[decode_id].outstanding.done(need_blocks)
        self._on_end(request)

    def _refuse(self, request: Request, error: str) -> None:
        request.error = error
        self._on_end(request)
