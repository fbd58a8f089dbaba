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
is the one with the fewest tokens to compute, those of the prompt among them. A decode worker is asked the earlier, the less
time it takes from there on: to the first token, and for the answer at the pace of its steps (`router.rules.pace`). A prefix
that many ask for spreads by itself: once the queue of those that have it is longer than the prefix, another one computes it.

In every mode the decode worker computes what no prefill worker can have: a stream of which it holds more than the prompt. A
stream that has to go on elsewhere is computed by the decode worker while all prefill workers are busy, because the streams of a
lost worker all stand still at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

from configs.schema import ClusterConfig
from router.rules.disaggregation import Case, Costs, here_s, prefill_here, there_s
from router.rules.pace import Pace
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad, prefill_window

_MOST_DECODE_HOLDERS, _MOST_BY_LOAD = 6, 4
"""Decode workers whose costs are compared: those that hold the most of a prompt, and those with the most room."""
LEAST_DECODE_WINDOW = 64
"""Prompt tokens that one router keeps at a decode worker at least, however few a step has: the ends of several prompts whose
beginnings it holds, such as the choices of one request."""


@dataclass(frozen=True)
class PairTerms:
    """What the configuration says about the choice. Windows are the prompt tokens that one router keeps at a worker."""

    disaggregation: Literal["always", "auto", "never"]
    prefill_window: int
    decode_window: int

    @classmethod
    def of(cls, config: ClusterConfig) -> PairTerms:
        """The terms of this configuration."""
        return cls(config.disaggregation, prefill_window(config), max(config.chunk_tokens, LEAST_DECODE_WINDOW))


@dataclass(frozen=True)
class PairRequest:
    """What is known of the request. Lengths are in tokens."""

    num_tokens: int
    """Prompt, and the answer so far of a resumed stream: all of it is to be computed."""
    num_prompt_tokens: int
    need_blocks: int
    """KV blocks for these tokens and the beginning of the answer."""
    tenant: str
    scores_prompt: bool = False
    """Logprobs of the prompt are wanted and were not given yet."""
    copied_to: str | None = None
    """Id of the decode worker that has a copy of the stream's KV; it is asked first."""
    copied_tokens: int = 0
    """Length of that copy."""
    avoid: Container[str] = ()
    """Ids of workers that are chosen only if no other is left."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Tokens at the prompt's beginning whose KV workers have cached, by worker, as far as is known. Empty if nobody asks."""

    def held_by(self, worker_id: str) -> int:
        """Tokens at the prompt's beginning whose KV this worker probably has; the last token is always computed."""
        copied = self.copied_tokens if worker_id == self.copied_to else 0
        return max(copied, min(self.held.get(worker_id, 0), self.num_tokens - 1))

    @property
    def resumed(self) -> bool:
        """Some of the answer was emitted before."""
        return self.num_tokens > self.num_prompt_tokens


@dataclass(frozen=True)
class Moment:
    """What else decides, and changes from one look to the next."""

    costs: Costs | None
    """What computing and handing over took lately; None if nothing was measured, or nobody asks."""
    lasting_costs: Costs | None
    """The same, however long ago it was."""
    pace: Pace | None
    """What the answers take at decode workers; None likewise."""
    num_waiting: int
    """Requests in the router's line, this one included."""
    waiting_of: Callable[[str], int]
    """Number of requests that a tenant has in line."""


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
                return DecodeQuestion(worker_id, own_tokens(self._request, self._terms), last=self._next is None)
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
        there_held = self._request.held_by(computing.worker_id)
        num_missing = self._request.num_tokens - (held_tokens if here else there_held)
        overtaking = _overtaking(self._request.tenant, moment.waiting_of)
        ahead = not here and overtaking is not None and overtaking(computing.prompts)
        return Pair(decode.worker_id, computing.worker_id, num_missing, ahead)

    def _candidates(self, moment: Moment) -> Iterator[str]:
        request, never = self._request, self._terms.disaggregation == "never"
        by_load = partial(
            self._decodes.candidates, request.need_blocks, by_prompts=never, first=request.copied_to, avoid=request.avoid
        )
        costs, pace = moment.lasting_costs, moment.pace
        if not request.held or costs is None or pace is None or request.copied_tokens:
            return by_load()
        by_prefill_s = math.inf
        if self._prefills and not never:
            there = self._prefills.best(request.num_tokens, sys.maxsize, None, request.avoid, request.held)
            held_there, ahead_there = _there(request, there, self._prefills)
            by_prefill_s = there_s(ahead_there, request.num_tokens - held_there, costs)
        may_here = never or self._terms.disaggregation == "auto"

        def seconds(decode: WorkerLoad) -> float:
            missing = request.num_tokens - request.held_by(decode.worker_id)
            first_s = by_prefill_s + costs.handoff.seconds(missing)
            if may_here:
                running = decode.report.running if decode.report else 0
                first_s = min(first_s, here_s(decode.queued_tokens, missing, running, costs))
            return first_s + pace.seconds(decode.held_blocks + request.need_blocks)

        holders = islice(self._decodes.holders(request.held), _MOST_DECODE_HOLDERS)
        looked_at = [*holders, *islice(by_load(), _MOST_BY_LOAD)]
        return self._decodes.cheapest_first(looked_at, request.need_blocks, seconds, by_load, request.avoid)

    def _computing(self, decode: WorkerLoad, held_tokens: int, moment: Moment) -> WorkerLoad | None:
        return computing_worker(self._request, held_tokens, decode, self._prefills, moment, self._terms)


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
    mode, there = terms.disaggregation, None
    if mode != "never":
        overtaking = _overtaking(request.tenant, moment.waiting_of)
        there = prefills.best(request.num_tokens, terms.prefill_window, overtaking, request.avoid, request.held)
    if _needs_prefill(request, terms) or (mode == "always" and there is not None):
        return there
    takes = decode.prompts.takes_prompt(request.num_tokens - held_tokens, terms.decode_window + held_tokens)
    here = decode if takes and decode.prompts.refused_size is None else None
    if mode != "auto" or not prefills:
        return here
    if _better_here(request, held_tokens, decode, there, prefills, moment.costs):
        return here or there
    # Waiting for the better place holds up the requests behind this one.
    return here if there is None and moment.num_waiting > 1 else there


def own_tokens(request: PairRequest, terms: PairTerms) -> int:
    """Tokens at the prompt's end that must not come from the decode worker's cache: it may compute them for their logits."""
    if _needs_prefill(request, terms):
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
) -> bool:
    """The decode worker had better compute the prompt itself: only it is not to be avoided, or it is sooner done."""
    all_avoided = prefills.all_in(request.avoid)
    if all_avoided != (decode.worker_id in request.avoid):
        return all_avoided
    if costs is None:
        return False
    held_there, ahead_there = _there(request, there, prefills)
    case = Case(
        num_tokens=request.num_tokens,
        held_tokens=held_tokens,
        held_there=held_there,
        ahead_here=decode.queued_tokens,
        ahead_there=ahead_there,
        running=decode.report.running if decode.report else 0,
    )
    return prefill_here(case, costs)


def _there(request: PairRequest, there: WorkerLoad | None, prefills: PrefillRanking) -> tuple[int, int]:
    """Tokens of the prompt that the best prefill worker holds, and those ahead of it.

    `there` is the one that takes the prompt, None if none does now. One that does not take it may have less to do.
    """
    least = prefills.least_queued_tokens
    if there is not None and there.queued_tokens - (held := request.held_by(there.worker_id)) <= least:
        return held, there.queued_tokens
    return 0, least
