"""From a request to a pair of workers with room for it.

    arrive ──► wait in line: at the front, and a pair has room ──► Claim
                  └─► no room in time, or nobody is up ──────────► 429 | 503

A worker's queue is first come, first served, so requests are held back here, where it is known which one is due: a prefill
worker gets no more from one router than keeps it busy for two steps. There is one exception. A tenant with a single request may
have its prompt put in front of the prompts of tenants with more; it then waits for one step of a long prompt, not for all of
it. Blocks are reserved at the decode worker before any prefill work is spent. A `Claim` (`router.dispatch.claim`) holds what
the request has at both workers, and gives it back when it is left.

`router.rules.pair` chooses the pair, and whether the decode worker computes the prompt itself. This file asks the workers, and
lets requests wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial

from configs.arithmetic import LONG_STEPS
from configs.model_files.kv_window import WHOLE, KvWindow, decode_at_once, prefill_at_once
from configs.schema import ClusterConfig
from protocol.cache.keys import block_keys, keys_of
from protocol.errors import (
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    TandemError,
    UnavailableError,
    WorkerLostError,
)
from protocol.messages.prefill import FetchFrom
from protocol.messages.workers import Role
from protocol.ticket import reserved_tokens
from router.dispatch.claim import Claim, Placed, PromptWork
from router.dispatch.journal import Journal
from router.dispatch.line import Place, WaitingLine
from router.dispatch.reservation import Asking, Reservation, Room, reserve
from router.dispatch.revisions.watch import RolloutWatch
from router.dispatch.roster import Roster
from router.dispatch.status import needed_roles
from router.rules.caching.caches import CachedParts
from router.rules.caching.kin import Kin
from router.rules.caching.reach import NotLending
from router.rules.disaggregation import PrefillCosts
from router.rules.line_rules import LEVELS_PER_QUEUE_TIME
from router.rules.pair import Pair, PairSearch
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.retry_policy import UnreachedPairs
from router.rules.rollout.revisions import revisions_for
from router.rules.worker_load import blocks_at_once
from telemetry.logging import fields
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_RETRY_WHEN_DOWN_S = 5.0
_KEYS_AT_ONCE = 512
"""Blocks of a prompt that are hashed without a look at the other requests. They take half a millisecond."""
_IMPATIENCE = 0.25
"""Share of a lease that a decode worker gets to answer while there are others to ask."""


class Admission:
    """Finds a pair of workers for each request of one router, and lets requests wait while there is no room."""

    def __init__(
        self, config: ClusterConfig, roster: Roster, metrics: Metrics, watch: RolloutWatch, window: KvWindow = WHOLE
    ) -> None:
        """`watch` hears of workers of a new configuration that refuse what they should not. `window` is what the model's tokens
        see.
        """
        self._config = config
        self._window = window
        self._roster = roster
        self._metrics = metrics
        self._watch = watch
        self._costs = PrefillCosts()
        self._terms = PairTerms.of(config)
        self._not_lending = NotLending(time.monotonic)
        self._unreached = UnreachedPairs()
        self._kin = Kin()
        self._line = WaitingLine(config.limits.max_waiting_requests, config.limits.queue_s / LEVELS_PER_QUEUE_TIME)

    async def admit(self, attempt_id: str, journal: Journal, deadline: float, *, retried: bool, avoid: Container[str]) -> Claim:
        """Wait for a pair with room for what is left of the request; the caller leaves the Claim. Workers in `avoid` come last.

        A request that is `retried`, since an earlier attempt at it failed, goes ahead of all others. If its answer has begun it
        waits beyond `deadline`, unless a role has had no worker since: others are before it, and its client has a part already.
        So does a choice of a request of which another choice has begun.

        Raises InvalidRequestError when no worker's pool could ever hold it. Raises OverloadedError when too many wait already,
        when no room came until `deadline` (the loop's time), or when none would at the present pace. Raises UnavailableError
        when no worker of a role was up until then.
        """
        self.check_possible(journal.num_tokens, journal.remaining_tokens)
        cached = await self._cached_parts(journal)
        missing = self._missing_role()
        with self._placed(journal, deadline, ahead=retried) as place:
            if place.outranks_front:
                self._roster.note_change()  # who waits for room at the front lets it look first
            asking = Asking(journal.num_tokens, journal.scheduling_class)
            find = partial(self._try, attempt_id, journal, cached, avoid, asking, again=retried)
            while True:
                try:
                    claim = await self._look(find, asking, place)
                except TimeoutError:
                    missed, missing = missing, self._missing_role()
                    begun = journal.progress.begun or (retried and journal.answer_begun)
                    if not begun or (missed and missing):
                        raise self._refusal(journal) from None
                    place.deadline += self._config.limits.queue_s
                    continue
                if claim is not None:
                    place.served = True
                    return claim

    async def _look(self, find: Callable[[], Awaitable[Claim | None]], asking: Asking, place: Place) -> Claim | None:
        """What `find` finds when the place comes to the front. None if there is no room, as soon as anything has changed.

        Raises TimeoutError at the place's deadline.
        """
        await place.front()
        self._roster.check_open()
        seen = self._roster.changes
        asking.asked.clear()
        claim = await find()
        if claim is not None:
            return claim
        if asking.asked and all(asking.scheduling_class in link.claims.turned_away for link in asking.asked):
            place.step_aside()
        elif not asking.asked and self._waits_for_a_long_one(asking.num_tokens):
            place.let_pass()
        await self._roster.next_change(seen, place.deadline)
        return None

    def note_failure(self, claim: Claim, error: UnavailableError) -> set[str]:
        """Note why an attempt has failed. Return the ids of the workers that its next attempt had better avoid.

        Where a handoff has failed late though both workers are there, these may not reach each other, and others may not
        either: the request had better be computed where it is decoded. A worker that flips sends back what it has not begun,
        which says nothing about others.
        """
        late = claim.age_s > self._config.limits.lease_s / 2 and claim.computes.duty.does(Role.PREFILL)
        if claim.lost or claim.here or not late or not isinstance(error, KvTransferError | WorkerLostError):
            return claim.lost or {link.ref.worker_id for link in claim.workers}
        computes, decode = claim.computes.ref.worker_id, claim.decode.ref.worker_id
        self._unreached.note(computes, decode, time.monotonic())
        log.warning("nothing gets from %s to %s: others are tried first", computes, decode)
        return {decode, *(link.ref.worker_id for link in self._roster.ready(Role.PREFILL))}

    def _waits_for_a_long_one(self, num_tokens: int) -> bool:
        """Whether a prompt is long, and a long one is being computed by every worker that might take it.

        Short ones are computed beside that. As soon as it ends somewhere, nobody passes a long prompt any more.
        """
        never = self._terms.disaggregation == "never"
        step_tokens = self._terms.decode_step if never else self._terms.prefill_step
        long = LONG_STEPS * step_tokens
        links = self._roster.ready(Role.DECODE if never else Role.PREFILL)
        return num_tokens > long and bool(links) and all(link.prompts.longest_prompt > long for link in links)

    @contextmanager
    def _placed(self, journal: Journal, deadline: float, *, ahead: bool) -> Iterator[Place]:
        """A place in line, which is counted."""
        try:
            entering = self._line.place(
                journal.scheduling_class, self._cost(journal), deadline, ahead=ahead, progress=journal.progress
            )
            with entering as place:
                self._metrics.waiting_requests.set(len(self._line))
                yield place
        finally:
            self._metrics.waiting_requests.set(len(self._line))

    def check_possible(self, num_prompt_tokens: int, max_tokens: int, prompt_param: str = "prompt") -> None:
        """Raise InvalidRequestError if the request is larger than the largest pool of a role that it needs.

        `prompt_param` is the field that holds the prompt. Pools have the configuration's size until a worker has reported.
        """
        prefill_room, decode_room = (self.pool_tokens(role) for role in (Role.PREFILL, Role.DECODE))
        prompt_at_once = prefill_at_once(self._config, self._window, num_prompt_tokens)
        if self._config.disaggregation == "always" and prompt_at_once > prefill_room:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the KV pool of a prefill worker holds {prefill_room}",
                param=prompt_param,
            )
        all_tokens = num_prompt_tokens + max_tokens - 1  # the last token needs no slot
        if decode_at_once(self._config, self._window, all_tokens) > decode_room:
            raise InvalidRequestError(
                f"prompt ({num_prompt_tokens}) and max_tokens ({max_tokens}) need {num_prompt_tokens + max_tokens} tokens, "
                f"but the KV pool of a decode worker holds {decode_room}",
                param="max_tokens",
            )

    def num_waiting(self) -> int:
        """Number of requests that wait for room."""
        return len(self._line)

    def pool_tokens(self, role: Role) -> int:
        """Tokens that the largest KV pool of this role holds."""
        block_size = self._config.block_size
        pool = self._config.prefill if role is Role.PREFILL else self._config.decode
        largest = self._roster.largest_pool(role)
        return (pool.kv_cache_tokens // block_size if largest is None else largest) * block_size

    def _cost(self, journal: Journal) -> int:
        """Tokens for which a claim takes KV blocks at once: those to prefill, and the first room of the answer."""
        return reserved_tokens(journal.num_tokens, journal.remaining_tokens, self._config.block_size)

    async def _cached_parts(self, journal: Journal) -> CachedParts | None:
        """What asks who has the beginning of the prompt; None if nobody is asked, or nobody has its first block and no other
        prompt is said to belong to it.
        """
        caches, size, name = self._roster.caches, self._config.block_size, _kin_name(journal)
        if caches is None or (name is None and not caches.num_blocks):
            return None
        if name is None and not caches.held(block_keys(journal.token_ids[:size], size, journal.cache_salt)):
            return None
        keys: list[bytes] = []
        for key in keys_of(journal.token_ids, size, journal.cache_salt):
            keys.append(key)
            if len(keys) % _KEYS_AT_ONCE == 0:
                await asyncio.sleep(0)
        expected = {} if name is None else self._kin.expected(name, keys, time.monotonic())
        return CachedParts(caches, keys, size, expected)

    async def _try(
        self,
        attempt_id: str,
        journal: Journal,
        cached: CachedParts | None,
        avoid: Container[str],
        asking: Asking,
        *,
        again: bool,
    ) -> Claim | None:
        """A claim if some pair has room now; decode workers are asked in turn.

        `again`: an earlier attempt has failed.
        """
        request, roster = self._pair_request(journal, cached, avoid), self._roster
        ready, decoding = roster.revisions_with(needed_roles(self._config)), roster.revisions_with((Role.DECODE,))
        revisions = revisions_for(roster.view, journal.trace, again=again or journal.num_generated > 0, ready=ready)
        for revision in revisions:
            fleet = roster.fleet(revision)
            search = PairSearch(request, fleet.prefills, fleet.decodes, self._terms)
            last = not any(other in decoding for other in revisions[revisions.index(revision) + 1 :])
            try:
                claim = await self._try_fleet(attempt_id, journal, cached, search, request, asking, last=last)
            except TandemError as error:
                if revision == roster.view.revision or roster.view.revision not in decoding:
                    raise  # nobody else can say better
                self._watch.refused(revision)
                log.warning("a new worker refuses: %s", error.message, extra=fields(trace=journal.trace.trace_id))
                continue
            if claim is not None:
                return claim
        return None

    async def _try_fleet(
        self,
        attempt_id: str,
        journal: Journal,
        cached: CachedParts | None,
        search: PairSearch,
        request: PairRequest,
        asking: Asking,
        *,
        last: bool,
    ) -> Claim | None:
        """A claim at the workers of one revision, the `last` one that is asked or not."""
        lease_s = self._config.limits.lease_s
        while (question := search.next_decode(self._moment())) is not None:
            decode = self._roster.ready_decode(question.worker_id)
            assert decode is not None, "the search knows the workers that are ready"
            duty = decode.duty
            if not asking.may_ask(decode, asyncio.get_running_loop().time()):
                continue
            room = Room(
                token_ids=journal.token_ids,
                max_tokens=journal.remaining_tokens,
                num_blocks=request.need_blocks,
                own_tokens=question.own_tokens,
                displaces=True,
            )
            patience_s = lease_s if last and question.last else _IMPATIENCE * lease_s
            reservation = await reserve(decode, attempt_id, journal, room, patience_s)
            if reservation is None:
                asking.refused(decode, asyncio.get_running_loop().time())
                continue
            if decode.duty is not duty:  # it has flipped meanwhile, and its ticket may not be what the pair needs
                reservation.release()
                continue
            if cached is not None:
                cached.told(question.worker_id, reservation.ticket.held_tokens)
            pair = search.pair(decode.load(), reservation.ticket.held_tokens, self._moment())
            if pair is not None:
                self._note_kin(journal, cached, pair)
                return self._claim(attempt_id, journal, reservation, pair)
            reservation.release()
        return None

    def _pair_request(self, journal: Journal, cached: CachedParts | None, avoid: Container[str]) -> PairRequest:
        copied_to, copied_tokens = None, 0
        if journal.copy is not None:
            copied_to = journal.copy.life.worker_id
            link = self._roster.ready_decode(copied_to)
            copied_tokens = 0 if link is None else journal.copied_at(link.life)
        scores_prompt = journal.sampling.num_prompt_logprobs is not None and not journal.num_generated
        if cached is not None:
            cached.look(asyncio.get_running_loop().time())
        return PairRequest(
            num_tokens=journal.num_tokens,
            num_prompt_tokens=len(journal.prompt_token_ids),
            need_blocks=blocks_at_once(self._config, self._window, self._cost(journal)),
            tenant=journal.scheduling_class.tenant,
            scores_prompt=scores_prompt,
            copied_to=copied_to,
            copied_tokens=copied_tokens,
            avoid=avoid,
            held={} if cached is None or scores_prompt else cached,  # who scores a prompt computes all of it
            lendable=None if cached is None else cached.lendable,
            not_lending=self._not_lending,
            unreached=self._unreached.pairs(time.monotonic()),
        )

    def _moment(self) -> Moment:
        now, by_cache = asyncio.get_running_loop().time(), self._roster.caches is not None
        costs = self._costs.lines(now) if self._config.disaggregation == "auto" else None
        lasting = self._costs.lines(None) if by_cache else None
        pace = self._roster.pace.pace() if by_cache else None
        return Moment(costs, lasting, pace, len(self._line), self._line.num_of)

    def _claim(self, attempt_id: str, journal: Journal, reservation: Reservation, pair: Pair) -> Claim:
        computes = reservation.decode if pair.here else self._roster.ready_prefill(pair.computes)
        assert computes is not None, "the search knows the workers that are ready"
        self._metrics.decided("here" if pair.here else "there")
        tenant = journal.scheduling_class.tenant
        prompt = PromptWork(computes, pair.num_missing, tenant, self._roster.note_change, ahead=pair.ahead)
        lender = None if pair.fetch_from is None else self._roster.ready_worker(pair.fetch_from)
        if lender is not None and lender.ref.computation != computes.ref.computation:
            if lender.revision == computes.revision:  # else the others of its revision can still borrow from it
                self._not_lending.note(lender.ref.worker_id, time.monotonic())
            lender = None
        fetch = None if lender is None else FetchFrom(lender.ref, pair.fetch_tokens)
        placed = Placed(pair.reason, fetch, self._not_lending)
        return Claim(attempt_id, reservation, prompt, journal, self._costs, self._roster.pace, placed)

    def _note_kin(self, journal: Journal, cached: CachedParts | None, pair: Pair) -> None:
        if (name := _kin_name(journal)) is not None and cached is not None:
            workers = (pair.computes,) if pair.here else (pair.computes, pair.decode)
            self._kin.placed(name, cached.keys_of_prompt, workers, time.monotonic())

    def _missing_role(self) -> Role | None:
        """A role that requests need, and of which no worker is up; None if there is none."""
        return next((role for role in needed_roles(self._config) if not self._roster.ready(role)), None)

    def _refusal(self, journal: Journal) -> TandemError:
        waited_s = self._config.limits.queue_s
        if (role := self._missing_role()) is not None:
            return UnavailableError(f"no {role.value} worker came up within {waited_s:g} s", retry_after_s=_RETRY_WHEN_DOWN_S)
        retry_after_s = self._line.retry_after_s(journal.scheduling_class)
        return OverloadedError(f"no room within {waited_s:g} s: all workers are full", retry_after_s=retry_after_s)


def _kin_name(journal: Journal) -> str | None:
    """What prompts that belong to this one are known by. Those of other salts, and so of other tenants, have other names."""
    return None if journal.prompt_cache_key is None else f"{journal.cache_salt}\0{journal.prompt_cache_key}"
