"""A simulated request with its pair of workers: from the claim to the last token, and what a router learns by it.

    claim ──► fetch ──► prefill ──► first token ──► attach ──► finished
                └──► computed where it is decoded ───────────────┘

`router.dispatch.claim` does the same in the real router.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from protocol.messages.load import FAILED_LATE_S, LoadReport
from router.rules.caching.reach import NotLending
from router.rules.disaggregation import PrefillCosts, PromptUnderWay
from router.rules.fair_queue import ANYBODY
from router.rules.pace import PaceMeter
from router.rules.pair import Pair
from router.rules.worker_load import Outstanding, WorkerLoad
from simulator.decode import DecodeWorker, Granted
from simulator.fetching import Wanted
from simulator.prefill import Job, PrefillWorker
from simulator.request import Request
from simulator.shared import Site


class _Nobody(Container[str]):
    """Contains every worker: nobody lends."""

    def __contains__(self, worker_id: object) -> bool:
        return True


@dataclass(eq=False)
class Known:
    """A worker as a router knows it."""

    worker_id: str
    outstanding: Outstanding
    prompts: Outstanding
    report: LoadReport | None = None

    def load(self) -> WorkerLoad:
        """What is known of the worker's load now."""
        return WorkerLoad(self.worker_id, self.report, self.outstanding, self.prompts)


class Learned:
    """What one router has measured of its requests."""

    def __init__(self, site: Site, *, fetch: bool) -> None:
        """`fetch`: workers are asked for blocks."""
        config, clock = site.config, site.clock
        self.by_cache = config.routing == "cache"
        self.learns = self.by_cache or config.disaggregation == "auto"
        """Anybody asks for the costs."""
        self.costs = PrefillCosts()
        self.pace = PaceMeter()
        self._lately = NotLending(lambda: clock.now)
        self.not_lending: Container[str] = self._lately if fetch else _Nobody()

    def not_lent(self, worker_id: str, now: float) -> None:
        """Note that nothing came from a worker that was asked for blocks."""
        self._lately.note(worker_id, now)


@dataclass(frozen=True, eq=False)
class Claim:
    """What a request holds at its workers, once it has left the line."""

    request: Request
    need_blocks: int
    pair: Pair
    granted: Granted
    decode: DecodeWorker
    computing: Known
    waits: bool
    """Other prompts go before it where it is computed."""
    claimed_at: float
    under_way: PromptUnderWay | None
    """The prompt, if it waits neither for others nor for what it fetches."""


class Claims:
    """The claims of one router. `on_end` is told of every request once, and `on_change` is called when there may be room."""

    def __init__(
        self,
        site: Site,
        prefills: Mapping[str, PrefillWorker],
        decodes: Mapping[str, DecodeWorker],
        known: Mapping[str, Known],
        learned: Learned,
        on_end: Callable[[Request], None],
        on_change: Callable[[], None],
    ) -> None:
        self._clock = site.clock
        self._message_s = site.profile.overheads.message_s
        self._prefills = prefills
        self._decodes = decodes
        self._known = known
        self._learned = learned
        self._on_end = on_end
        self._on_change = on_change

    def begin(self, claim: Claim) -> None:
        """Have the claim's prompt computed by the chosen worker."""
        claim.computing.prompts.give_prompt(claim.pair.num_missing, ANYBODY.tenant, ahead=claim.pair.ahead)
        self._clock.after(self._message_s, self._compute_here if claim.pair.here else self._compute_there, claim)

    def finished(self, request: Request, decode_id: str, need_blocks: int) -> None:
        """Take the last token, which is here."""
        request.last_at = self._clock.now
        if self._learned.by_cache:
            self._learned.pace.answered(request.output_len, self._clock.now)
        self._known[decode_id].outstanding.done(need_blocks)
        self._on_end(request)

    def _compute_there(self, claim: Claim) -> None:
        """The prompt is at the prefill worker."""
        first = (self._message_s, self._first_token, claim)
        pair, ticket_id = claim.pair, claim.granted.ticket_id
        lender = None if pair.fetch_from is None else self._prefills.get(pair.fetch_from) or self._decodes[pair.fetch_from]
        job = Job(
            request=claim.request,
            on_first=lambda: self._clock.after(*first),
            on_handed_over=lambda: claim.decode.commit(ticket_id),
            wanted=None if lender is None else Wanted(lender.lender, pair.fetch_tokens),
            held_tokens=claim.granted.held_tokens if self._learned.by_cache else None,
        )
        self._prefills[pair.computes].prefill(job)

    def _compute_here(self, claim: Claim) -> None:
        """The order to compute the prompt is at the decode worker, which ends the stream by itself."""
        first = (self._message_s, self._first_token, claim)
        claim.decode.attach_here(claim.granted.ticket_id, lambda: self._clock.after(*first))

    def _first_token(self, claim: Claim) -> None:
        request, ticket_id = claim.request, claim.granted.ticket_id
        request.first_at = self._clock.now
        if not claim.pair.here and request.output_len > 1:
            attached = (self._message_s, self._attached, claim, self._clock.now)
            on_attached = (lambda: self._clock.after(*attached)) if self._learned.learns else None
            self._clock.after(self._message_s, claim.decode.attach, ticket_id, on_attached)
        elif not claim.pair.here:
            self._clock.after(self._message_s, claim.decode.release, ticket_id)
            self.finished(request, claim.pair.decode, claim.need_blocks)
        if self._learned.learns:
            self._measure_prefill(claim)
        claim.computing.prompts.prompt_done(claim.pair.num_missing, ANYBODY.tenant)
        self._on_change()

    def _measure_prefill(self, claim: Claim) -> None:
        """Note what the prompt took, as a claim in the router does: without the wait for other prompts, and for blocks from
        elsewhere."""
        request, now, learned = claim.request, self._clock.now, self._learned
        brought = request.brought
        prefill_s = now - self._message_s - request.prefill_began
        took_s = prefill_s if claim.waits else now - claim.claimed_at - brought.seconds
        if brought.peer_tokens:
            learned.costs.fetched(brought.peer_tokens, brought.peer_s, now)
        elif claim.pair.fetch_from is not None and brought.peer_s > FAILED_LATE_S:
            learned.not_lent(claim.pair.fetch_from, now)
        if claim.under_way is not None:
            learned.costs.ended(claim.under_way)
        learned.costs.prefilled(claim.pair.here, len(request.token_ids) - request.cached, took_s, now)

    def _attached(self, claim: Claim, asked_at: float) -> None:
        """The decode worker has the KV and goes on; the answer to the question of `asked_at` is here."""
        now = self._clock.now
        num_tokens = len(claim.request.token_ids) - claim.granted.held_tokens
        self._learned.costs.handed_over(num_tokens, now - asked_at, now)
