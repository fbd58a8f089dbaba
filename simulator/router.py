"""A router in virtual time: the admission of a request, around the router's own rules.

    arrive ──► line ──► front: ask decode workers in turn ──► claim (`simulator.claims`)
                 ▲          │ no room
                 └──────────┘ at the next change of any load, whoever is first then

`router.rules` decides who is first, which pair of workers it gets, whether the decode worker computes the prompt, and what is
fetched for it. What workers have cached they tell, as in `router.dispatch.admission`. Nobody dies here, and all requests are of
one class, so nothing is resumed, copied or overtaken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.cache.news import CacheNews
from protocol.errors import OverloadedError
from protocol.messages.load import LoadReport
from protocol.messages.workers import WorkerLife
from protocol.ticket import reserved_tokens
from router.rules.caching.caches import CachedParts, Caches
from router.rules.fair_queue import ANYBODY, Entry
from router.rules.line_rules import LEVELS_PER_QUEUE_TIME, LineRules
from router.rules.pair import DecodeQuestion, Pair, PairSearch
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, blocks_for
from simulator.claims import Claim, Claims, Known, Learned
from simulator.decode import DecodeWorker, Granted
from simulator.prefill import PrefillWorker
from simulator.request import Request
from simulator.shared import PartsOfOne, Site
from simulator.telling import EPOCH

_NO_ROOM = "no room in time"


@dataclass(eq=False)
class _Waiting:
    """A request in line."""

    request: Request
    entry: Entry
    asks: PairRequest
    cached: CachedParts | PartsOfOne | None
    """What asks who has the beginning of the prompt; None if nobody has its first block, or nobody is asked."""
    looking: bool = False
    """A decode worker is being asked."""
    late: bool = False
    """Its time was over meanwhile."""


class Router:
    """One router. `on_end` is told of every request once, whether it was answered or refused."""

    def __init__(
        self,
        site: Site,
        prefills: Sequence[PrefillWorker],
        decodes: Sequence[DecodeWorker],
        on_end: Callable[[Request], None],
        *,
        fetch: bool,
    ) -> None:
        """`fetch`: prefill workers may be told to fetch blocks from other workers."""
        config = site.config
        self.prefill_ranking, self.decode_ranking = PrefillRanking(), DecodeRanking()
        self.decisions: Counter[str] = Counter()
        """Prompts that were computed `here`, where they were decoded, and `there`, at a prefill worker."""
        self._site = site
        self._config = config
        self._terms = PairTerms.of(config)
        self._learned = Learned(site, fetch=fetch)
        self._message_s = site.profile.overheads.message_s
        self._clock = site.clock
        self._on_end = on_end
        self._line = LineRules(config.limits.max_waiting_requests, config.limits.queue_s / LEVELS_PER_QUEUE_TIME)
        self._waiting: dict[Entry, _Waiting] = {}
        self._parked: _Waiting | None = None
        """The request at the front, if it found no room: it looks again when something changes."""
        self._changes = 0
        self._prefills = {worker.worker_id: worker for worker in prefills}
        self._decodes = {worker.worker_id: worker for worker in decodes}
        self._away: set[str] = set()
        """Workers that take no requests."""
        self._known = {
            **{worker_id: self._know(worker_id, self.prefill_ranking) for worker_id in self._prefills},
            **{worker_id: self._know(worker_id, self.decode_ranking) for worker_id in self._decodes},
        }
        self._claims = Claims(site, self._prefills, self._decodes, self._known, self._learned, on_end, self._note_change)
        self._caches = Caches()
        lives = [WorkerLife(worker_id, EPOCH) for worker_id in self._known] if site.tell is not None else []
        self._followers = {life.worker_id: self._caches.follow(life, lambda ask: None, self._clock.now) for life in lives}

    def arrive(self, request: Request) -> None:
        """Take a request that a client sends now."""
        num_tokens, max_tokens = len(request.token_ids), request.output_len
        decode, prefill = next(iter(self._decodes.values())), next(iter(self._prefills.values()), None)
        context = self._config.max_model_len
        if context is not None and num_tokens + max_tokens > context:
            self._refuse(request, f"prompt ({num_tokens}) and answer ({max_tokens}) exceed the model's context ({context})")
        elif not decode.fits(num_tokens, max_tokens):
            room = self._config.decode.kv_cache_tokens
            self._refuse(request, f"prompt ({num_tokens}) and answer ({max_tokens}) exceed decode.kv_cache_tokens ({room})")
        elif prefill is not None and not prefill.fits(num_tokens):
            room = self._config.prefill.kv_cache_tokens
            self._refuse(request, f"the prompt ({num_tokens}) exceeds prefill.kv_cache_tokens ({room})")
        else:
            self._clock.after(self._site.profile.overheads.request_s, self._enter, request)

    def report(self, report: LoadReport) -> None:
        """Take a worker's load report."""
        known = self._known[report.worker_id]
        known.report = report
        known.outstanding.reported()
        if known.prompts is not known.outstanding:
            known.prompts.reported()
        if self._learned.by_cache:
            self._learned.pace.reported(report, self._clock.now)
        self._note_change()

    def beat(self, report: LoadReport) -> None:
        """Take a decode worker's report that says nothing new but how long its steps take."""
        self._learned.pace.reported(report, self._clock.now)

    def hear(self, news: CacheNews) -> None:
        """Take what a worker tells of its cache."""
        self._followers[news.worker_id].hear(news, self._clock.now)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in line."""
        return len(self._line)

    def leave(self, worker_id: str) -> None:
        """Give a worker no more requests. It goes on with those that it has."""
        self._away.add(worker_id)
        (self.prefill_ranking if worker_id in self._prefills else self.decode_ranking).discard(worker_id)
        if worker_id in self._followers:
            self._caches.leave(self._followers[worker_id], self._clock.now)

    def join(self, worker_id: str) -> None:
        """Let a worker that was away get requests again."""
        self._away.discard(worker_id)
        if worker_id in self._followers:
            self._followers[worker_id] = self._caches.follow(WorkerLife(worker_id, EPOCH), lambda ask: None, self._clock.now)
        ranking = self.prefill_ranking if worker_id in self._prefills else self.decode_ranking
        ranking.put(self._known[worker_id].load())
        self._note_change()

    def load_of(self, worker_id: str) -> LoadReport | None:
        """The latest load report of a worker."""
        return self._known[worker_id].report

    def _know(self, worker_id: str, ranking: PrefillRanking | DecodeRanking) -> Known:
        def changed() -> None:
            if worker_id not in self._away:
                ranking.put(known.load())

        outstanding = Outstanding(on_change=changed)
        prompts = outstanding if ranking is self.prefill_ranking else Outstanding(on_change=changed)
        known = Known(worker_id, outstanding, prompts)
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
        cached = self._cached_parts(request)
        held: Mapping[str, int] = {} if cached is None else cached
        asks = PairRequest(
            num_tokens=len(request.token_ids),
            num_prompt_tokens=len(request.token_ids),
            need_blocks=blocks_for(cost, self._config.block_size),
            tenant=ANYBODY.tenant,
            held=held,
            not_lending=self._learned.not_lending,
        )
        self._waiting[entry] = _Waiting(request, entry, asks, cached)
        self._call()
        if entry in self._waiting:
            self._clock.at(now + queue_s, self._out_of_time, entry)  # not the request: by then it is mostly gone

    def _cached_parts(self, request: Request) -> CachedParts | PartsOfOne | None:
        block_size = self._config.block_size
        if self._site.one_cache is not None:
            return PartsOfOne(self._site.one_cache, request.keys(block_size), block_size, list(self._known))
        if not self._caches.num_blocks:
            return None
        keys = request.keys(block_size)
        return CachedParts(self._caches, keys, block_size) if self._caches.held(keys[:1]) else None

    def _call(self) -> None:
        entry = self._line.call(self._clock.now)
        if entry is not None:
            self._look(self._waiting[entry])

    def _look(self, waiting: _Waiting) -> None:
        seen = self._changes
        if waiting.cached is not None:
            waiting.cached.look(self._clock.now)
        self._ask(waiting, PairSearch(waiting.asks, self.prefill_ranking, self.decode_ranking, self._terms), seen)

    def _moment(self) -> Moment:
        costs, by_cache = self._learned.costs, self._learned.by_cache
        return Moment(
            costs=costs.lines(self._clock.now) if self._config.disaggregation == "auto" else None,
            lasting_costs=costs.lines(None) if by_cache else None,
            pace=self._learned.pace.pace() if by_cache else None,
            num_waiting=len(self._line),
            waiting_of=self._line.num_of,
        )

    def _ask(self, waiting: _Waiting, search: PairSearch, seen: int) -> None:
        """Ask the next decode worker for blocks, if there is one."""
        question = search.next_decode(self._moment())
        if question is None:
            self._found_none(waiting, seen)
            return
        waiting.looking = True
        self._known[question.worker_id].outstanding.give(waiting.asks.need_blocks)
        self._clock.after(self._message_s, self._reserve, waiting, search, question, seen)

    def _reserve(self, waiting: _Waiting, search: PairSearch, question: DecodeQuestion, seen: int) -> None:
        """The question is at the worker."""
        request, message_s = waiting.request, self._message_s
        finished = (message_s, self._claims.finished, request, question.worker_id, waiting.asks.need_blocks)
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
        if waiting.cached is not None:
            waiting.cached.told(question.worker_id, granted.held_tokens)
        pair = search.pair(known.load(), granted.held_tokens, self._moment())
        if pair is None:
            self._clock.after(self._message_s, self._decodes[question.worker_id].release, granted.ticket_id)
            known.outstanding.done(need_blocks)
            self._ask(waiting, search, seen)
            return
        self._claimed(waiting, pair, granted)

    def _claimed(self, waiting: _Waiting, pair: Pair, granted: Granted) -> None:
        """The request has its pair: it leaves the line, and its prompt is sent."""
        computing, now = self._known[pair.computes], self._clock.now
        waits = computing.load().queued_tokens > 0
        alone = self._learned.learns and not waits and pair.fetch_from is None
        self.decisions["here" if pair.here else "there"] += 1
        claim = Claim(
            request=waiting.request,
            need_blocks=waiting.asks.need_blocks,
            pair=pair,
            granted=granted,
            decode=self._decodes[pair.decode],
            computing=computing,
            waits=waits,
            claimed_at=now,
            under_way=self._learned.costs.begun(pair.here, pair.num_missing, now) if alone else None,
        )
        del self._waiting[waiting.entry]
        self._line.leave(waiting.entry, now, served=True)
        self._claims.begin(claim)
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

    def _out_of_time(self, entry: Entry) -> None:
        waiting = self._waiting.get(entry)
        if waiting is None:
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

    def _refuse(self, request: Request, error: str) -> None:
        request.error = error
        self._on_end(request)
