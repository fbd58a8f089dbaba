"""Which decode worker a request should go to, and which worker computes its prompt. Pure.

    PairSearch.next_decode ──► ask that worker for blocks ──granted──► PairSearch.pair ──► both workers, or None
            ▲                              └── refused                                         │
            └──────────────────────────────────┴───────────────────────────────────────────────┘

The same code runs in the router (`router.dispatch.admission`) and in the simulator. It knows workers by `WorkerLoad`, in the
two rankings, and the request by `PairRequest`. The mode (`ClusterConfig.disaggregation`) decides about the prompt:

    always   a prefill worker computes it
    never    the decode worker does: those with the fewest prompt tokens ahead are asked first
    auto     whichever gives the first token sooner (`router.rules.disaggregation`)

What workers have cached of the prompt (`PairRequest.held`) need not be computed, or not be handed over. So the prefill worker
is the one with the fewest tokens to compute, those of the prompt among them, but for what it had better fetch from another
worker (`router.rules.caching.reach`). Where somebody holds some of the prompt, and always with `auto`, a decode worker is asked
the earlier, the less time it takes from there on. That is to the first token, and for the answer at the pace of its steps
(`router.rules.pace`). A prefix that many ask for spreads by itself: once the queue of those that have it is longer than the
prefix, another one computes it.

A worker of both roles is in both rankings. In a pair with itself it computes the prompt as a decode worker does.

In every mode the decode worker computes what no prefill worker can have: a stream of which it holds more than the prompt. A
stream that has to go on elsewhere is computed by the decode worker while all prefill workers are busy, because the streams of a
lost worker all stand still at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Literal

from router.rules.caching.reach import NO_REACH, Reach
from router.rules.disaggregation import Case, Costs, here_s, prefill_here, there_s
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad

_MOST_DECODE_HOLDERS, _MOST_BY_LOAD = 6, 4
"""Decode workers whose costs are compared: those that hold the most of a prompt, and those with the most room."""
Reason = Literal["decode_holds_it", "sooner_at_decode", "fetched", "prefill_holds_it", "least_queued"]
"""Why a prompt is computed where it is: what is known to be held there, or the least work ahead of it."""


@dataclass(frozen=True)
class DecodeQuestion:
    """Which decode worker to ask for blocks next."""

    worker_id: str
    own_tokens: int
    """Tokens at the prompt's end that must not come from the worker's cache, because their logits may be wanted there."""
    last: bool
    """No other worker is left to ask."""


@dataclass(frozen=True)
class Pair:
    """The decision: who decodes, and who computes the prompt, which is the same worker if nothing is handed over."""

    decode: str
    computes: str
    num_missing: int
    """Tokens that are to be computed, as far as is known."""
    ahead: bool
    """The prompt goes before those that are at the computing worker."""
    fetch_from: str | None
    """A worker whose blocks of the prompt the prefill worker fetches before it computes the rest."""
    fetch_tokens: int
    """Tokens at the prompt's beginning that are then in its pool."""
    reason: Reason

    @property
    def here(self) -> bool:
        """The prompt is computed where it is decoded."""
        return self.decode == self.computes


class PairSearch:
    """One look for a pair with room for one request.

    The order in which decode workers are asked is that of the first question; everything else is as known when it is asked.
    """

    def __init__(self, request: PairRequest, prefills: PrefillRanking, decodes: DecodeRanking, terms: PairTerms) -> None:
        self._request = request
        self._prefills = prefills
        self._decodes = decodes
        self._terms = terms
        self._order: Iterator[str] | None = None
        self._next: str | None = None

    def next_decode(self, moment: Moment) -> DecodeQuestion | None:
        """The decode worker to ask next; None if there is none, or if nobody would compute the prompt."""
        if self._order is None:
            self._order = self._candidates(moment)
            self._next = next(self._order, None)
        while self._next is not None:
            worker_id, self._next = self._next, next(self._order, None)
            load = self._decodes.find(worker_id)
            if load is None:
                continue  # it has left since the search began
            if self._computing(load, self._request.held_by(worker_id), moment) is not None:
                both = worker_id in self._prefills
                return DecodeQuestion(worker_id, own_tokens(self._request, self._terms, both=both), last=self._next is None)
            if _needs_prefill(self._request, self._terms):
                return None  # no prefill worker takes the prompt, whoever decodes it
        return None

    def pair(self, decode: WorkerLoad, held_tokens: int, moment: Moment) -> Pair | None:
        """The pair, now that the decode worker has granted blocks and holds this much of the prompt; None if nobody computes
        the rest now, so that the blocks go back."""
        computing = self._computing(decode, held_tokens, moment)
        if computing is None:
            return None
        here = computing.worker_id == decode.worker_id
        held = held_tokens if here else self._request.held_by(computing.worker_id)
        reach = NO_REACH if here else self._request.reach(moment.lasting_costs)
        fetches = reach.fetches(held)
        num_missing = self._request.num_tokens - (reach.tokens if fetches else held)
        overtaking = _overtaking(self._request.tenant, moment.waiting_of)
        ahead = not here and overtaking is not None and overtaking(computing.prompts)
        return Pair(
            decode=decode.worker_id,
            computes=computing.worker_id,
            num_missing=num_missing,
            ahead=ahead,
            fetch_from=reach.source if fetches else None,
            fetch_tokens=reach.tokens if fetches else 0,
            reason=_reason(here, held, fetches),
        )

    def _candidates(self, moment: Moment) -> Iterator[str]:
        request, mode = self._request, self._terms.disaggregation
        never = mode == "never"
        by_load = partial(
            self._decodes.candidates, request.need_blocks, by_prompts=never, first=request.copied_to, avoid=request.avoid
        )
        costs, pace = moment.costs or moment.lasting_costs, moment.pace
        alike = not request.held and mode != "auto"
        if alike or costs is None or pace is None or request.copied_tokens:
            return by_load()
        with_room = list(islice(by_load(), _MOST_BY_LOAD))
        if len(with_room) < 2:
            return iter(with_room)
        by_prefill_s = math.inf
        if self._prefills and not never:
            reach = request.reach(moment.lasting_costs)
            window, step_tokens = self._terms.prefill_window, self._terms.prefill_step
            there = self._prefills.best(request.num_tokens, window, _at_any, request.avoid, request.held, reach)
            saved_there, ahead_there = _there(request, there, self._prefills, reach, step_tokens)
            by_prefill_s = there_s(ahead_there, request.num_tokens - saved_there, costs)

        def seconds(decode: WorkerLoad) -> float:
            held = request.held_by(decode.worker_id)
            missing = request.num_tokens - held
            first_s = by_prefill_s + costs.handoff.seconds(missing)
            may_here = decode.worker_id in self._prefills if mode == "always" else _takes(decode, request, held, self._terms)
            if may_here:
                running = decode.report.running if decode.report else 0
                ahead = decode.ahead_of(missing, self._terms.decode_step)
                first_s = min(first_s, here_s(ahead, missing, running, costs))
            return first_s + pace.seconds(decode.held_blocks + request.need_blocks)

        looked_at = chain(islice(self._decodes.holders(request.held), _MOST_DECODE_HOLDERS), with_room)
        return self._decodes.cheapest_first(looked_at, request.need_blocks, seconds, by_load, request.avoid)

    def _computing(self, decode: WorkerLoad, held_tokens: int, moment: Moment) -> WorkerLoad | None:
        computing = computing_worker(self._request, held_tokens, decode, self._prefills, moment, self._terms)
        both = computing is not None and self._decodes.find(computing.worker_id) is not None
        compared = self._terms.disaggregation != "always" and moment.costs is not None
        if computing is not None and both and not compared and self._as_well_here(decode, held_tokens, computing):
            return decode
        return computing

    def _as_well_here(self, decode: WorkerLoad, held_tokens: int, other: WorkerLoad) -> bool:
        """Whether `decode`, which does both, computes the prompt as well as `other`, which does both, too, and would hand it
        over. Where costs were compared, that is decided already.
        """
        request, terms = self._request, self._terms
        if decode.worker_id not in self._prefills or decode.worker_id in request.avoid:
            return False
        takes = decode.prompts.takes_prompt(request.num_tokens, terms.prefill_window, terms.prefill_step, held_tokens)
        missing, there = request.num_tokens - held_tokens, request.num_tokens - request.held_by(other.worker_id)
        here_first = decode.ahead_of(missing, terms.prefill_step) + missing
        return takes and decode.prompts.refused_size is None and here_first <= other.ahead_of(there, terms.prefill_step) + there


def computing_worker(
    request: PairRequest,
    held_tokens: int,
    decode: WorkerLoad,
    prefills: PrefillRanking,
    moment: Moment,
    terms: PairTerms,
) -> WorkerLoad | None:
    """The worker that should compute a prompt of which `decode` holds this much: a prefill worker, or `decode` itself.

    None if no worker takes the prompt now, or if the request does well to wait.
    """
    if held_tokens > request.num_prompt_tokens:
        return decode  # no prefill worker has any of the answer
    mode, there, reach = terms.disaggregation, None, NO_REACH
    if mode != "never":
        overtaking = _overtaking(request.tenant, moment.waiting_of)
        reach = request.reach(moment.lasting_costs)
        avoid = request.avoid_beside(decode.worker_id)
        there = prefills.best(request.num_tokens, terms.prefill_window, overtaking, avoid, request.held, reach)
    if _needs_prefill(request, terms) or (mode == "always" and there is not None):
        return there
    here = decode if _takes(decode, request, held_tokens, terms) else None
    if mode != "auto" or not prefills:
        return here
    if _better_here(request, held_tokens, decode, there, prefills, moment.costs, reach, terms):
        return here or there
    # Waiting for the better place holds up the requests behind this one.
    return here if there is None and moment.num_waiting > 1 else there


def _takes(decode: WorkerLoad, request: PairRequest, held_tokens: int, terms: PairTerms) -> bool:
    """Whether a decode worker that holds this much of the prompt computes the rest now."""
    takes = decode.prompts.takes_prompt(request.num_tokens, terms.decode_window, terms.decode_step, held_tokens)
    return takes and decode.prompts.refused_size is None


def own_tokens(request: PairRequest, terms: PairTerms, *, both: bool) -> int:
    """Tokens at the prompt's end that must not come from the decode worker's cache: it may compute them for their logits.

    `both`: it does the work of both roles.
    """
    if _needs_prefill(request, terms) and not both:
        return 0
    return request.num_tokens if request.scores_prompt else 1


def _needs_prefill(request: PairRequest, terms: PairTerms) -> bool:
    """Only prefill workers may compute the prompt."""
    return terms.disaggregation == "always" and not request.resumed


def _overtaking(tenant: str, waiting_of: Callable[[str], int]) -> Callable[[Outstanding], bool] | None:
    """Tells which prompts in flight one of this tenant's may go before; None if the tenant has more requests in line."""
    if waiting_of(tenant) > 1:
        return None
    return lambda outstanding: outstanding.may_be_overtaken(tenant, waiting_of)


def _better_here(
    request: PairRequest,
    held_tokens: int,
    decode: WorkerLoad,
    there: WorkerLoad | None,
    prefills: PrefillRanking,
    costs: Costs | None,
    reach: Reach,
    terms: PairTerms,
) -> bool:
    """It is better computed by the decode worker: nobody reaches it, all others are to be avoided, or it is sooner done."""
    if request.unreached and prefills.all_in(request.not_reaching(decode.worker_id)):
        return True
    all_avoided = prefills.all_in(request.avoid_beside(decode.worker_id))
    if all_avoided != (decode.worker_id in request.avoid):
        return all_avoided
    if costs is None:
        return False
    saved_there, ahead_there = _there(request, there, prefills, reach, terms.prefill_step)
    case = Case(
        num_tokens=request.num_tokens,
        held_tokens=held_tokens,
        saved_there=saved_there,
        ahead_here=decode.ahead_of(request.num_tokens - held_tokens, terms.decode_step),
        ahead_there=ahead_there,
        running=decode.report.running if decode.report else 0,
    )
    return prefill_here(case, costs)


def _at_any(_prompts: Outstanding) -> bool:
    """Also at a worker that takes no prompt now: it will."""
    return True


def _there(
    request: PairRequest, there: WorkerLoad | None, prefills: PrefillRanking, reach: Reach, step_tokens: int
) -> tuple[int, int]:
    """Tokens of the prompt that the best prefill worker saves, and those ahead of it.

    `there` is the one that takes the prompt, None if none does now. One that does not take it may have less to do.
    """
    least = prefills.least_ahead_of(request.num_tokens - reach.saved(0), step_tokens)
    if there is not None:
        saved = reach.saved(request.held_by(there.worker_id))
        ahead = there.ahead_of(request.num_tokens - saved, step_tokens)
        if ahead - saved <= least - reach.saved(0):
            return saved, ahead
    return reach.saved(0), least


def _reason(here: bool, held: int, fetches: bool) -> Reason:
    if here:
        return "decode_holds_it" if held else "sooner_at_decode"
    if fetches:
        return "fetched"
    return "prefill_holds_it" if held else "least_queued"
