"""From a request to a pair of workers with room for it.

    arrive ──► wait in line: at the front, and a pair has room ──► Claim
                  └─► no room in time, or nobody is up ──────────► 429 | 503

A worker's queue is first come, first served, so requests are held back here, where it is known who is due: a prefill worker
gets no more from one router than keeps it busy for two steps. Only of a tenant that has no other request one more prompt may be
put in front of those of tenants that have: it then waits for a step of a long prompt of theirs, and not for all of it. Blocks
are reserved at the decode worker before any prefill work is spent. A `Claim` (`router.dispatch.claim`) holds what the request
has at both workers and gives all of it back when it is left.

The decode worker may compute the prompt itself: always (`disaggregation: never`), or where that is better (`auto`). It does so
in any case for a stream that has to go on elsewhere while prefill is busy: those of a lost worker all stand still at once; and
for one of which it has a copy (`router.dispatch.copies`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from protocol.messages import Role
from protocol.ticket import reserved_tokens
from router.dispatch.claim import Claim, Room, reserve
from router.dispatch.journal import Journal
from router.dispatch.line import WaitingLine
from router.dispatch.links import WorkerLink
from router.dispatch.roster import Roster
from router.dispatch.status import needed_roles
from router.rules.disaggregation import Case, PrefillCosts, prefill_here
from router.rules.line_rules import LEVELS_PER_QUEUE_TIME
from router.rules.worker_load import Outstanding, blocks_for, prefill_window
from telemetry.metrics import Metrics

_RETRY_WHEN_DOWN_S = 5.0
_IMPATIENCE = 0.25
"""Share of a lease that a decode worker gets to answer while there are others to ask."""


class Admission:
    """Chooses pairs, reserves, and lets wait whom there is no room for."""

    def __init__(self, config: ClusterConfig, roster: Roster, metrics: Metrics) -> None:
        self._config = config
        self._roster = roster
        self._metrics = metrics
        self._costs = PrefillCosts()
        self._prefill_window = prefill_window(config)
        self._line = WaitingLine(config.limits.max_waiting_requests, config.limits.queue_s / LEVELS_PER_QUEUE_TIME)
        metrics.waiting_requests.set_function(lambda: len(self._line))

    async def admit(self, attempt_id: str, journal: Journal, deadline: float, *, resumed: bool, avoid: Container[str]) -> Claim:
        """A pair with room for what is left of the request; the caller leaves the Claim. Workers in `avoid` come last.

        Raises InvalidRequestError when no worker's pool could ever hold it; OverloadedError when too many wait already, or
        no room came until `deadline` (the loop's time), or none would at the present pace; UnavailableError when no worker of
        a role was up until then.
        """
        self.check_possible(len(journal.token_ids), journal.remaining_tokens)
        try:
            with self._line.place(journal.scheduling_class, self._cost(journal), deadline, ahead=resumed) as place:
                while True:
                    await place.front()
                    self._roster.check_open()
                    seen = self._roster.changes
                    claim = await self._try(attempt_id, journal, avoid)
                    if claim is not None:
                        place.served = True
                        return claim
                    await self._roster.next_change(seen, deadline)
        except TimeoutError:
            raise self._refusal(journal) from None

    def check_possible(self, num_prompt_tokens: int, max_tokens: int, prompt_param: str = "prompt") -> None:
        """Raise InvalidRequestError if the request is larger than the largest pool of a role that it needs.

        `prompt_param` is the field that holds the prompt. Pools have the configuration's size until a worker has reported.
        """
        prefill_room, decode_room = (self.pool_tokens(role) for role in (Role.PREFILL, Role.DECODE))
        if self._config.disaggregation == "always" and num_prompt_tokens > prefill_room:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but the KV pool of a prefill worker holds {prefill_room}",
                param=prompt_param,
            )
        if num_prompt_tokens + max_tokens - 1 > decode_room:  # the last token needs no slot
            raise InvalidRequestError(
                f"prompt ({num_prompt_tokens}) and max_tokens ({max_tokens}) need {num_prompt_tokens + max_tokens} tokens, "
                f"but the KV pool of a decode worker holds {decode_room}",
                param="max_tokens",
            )

    def pool_tokens(self, role: Role) -> int:
        """Tokens that the largest pool of this role holds."""
        block_size = self._config.block_size
        pool = self._config.prefill if role is Role.PREFILL else self._config.decode
        largest = self._roster.largest_pool(role)
        return (pool.kv_cache_tokens // block_size if largest is None else largest) * block_size

    def _cost(self, journal: Journal) -> int:
        """Tokens that a claim takes at once: those to prefill, and the answer's first room."""
        return reserved_tokens(len(journal.token_ids), journal.remaining_tokens, self._config.answer_room)

    async def _try(self, attempt_id: str, journal: Journal, avoid: Container[str]) -> Claim | None:
        """A claim if some pair has room now. Decode workers are asked in turn, the one with the most room first."""
        num_tokens = len(journal.token_ids)
        need_blocks = blocks_for(self._cost(journal), self._config.block_size)
        order = self._roster.decode_order(need_blocks, avoid)
        if self._config.disaggregation == "never":
            order = self._by_prompts(order, avoid)
        if journal.copy is not None:
            copied_to = journal.copy.life.worker_id
            order = sorted(order, key=lambda worker_id: worker_id != copied_to)
        for worker_id in order:
            decode = self._roster.ready_decode(worker_id)
            if decode is None:
                continue
            if self._computes(journal, journal.copied_at(decode.life), decode, avoid) is None:
                if self._needs_prefill(journal):
                    return None
                continue
            lease_s = self._config.limits.lease_s
            patience_s = lease_s if worker_id == order[-1] else _IMPATIENCE * lease_s
            room = Room(journal.token_ids, journal.remaining_tokens, need_blocks, self._own_tokens(journal))
            ticket = await reserve(decode, attempt_id, journal, room, patience_s)
            if ticket is None:
                continue
            computes = self._computes(journal, ticket.held_tokens, decode, avoid)
            if computes is not None:
                self._metrics.decided("here" if computes is decode else "there")
                note_change = self._roster.note_change
                size = num_tokens - (ticket.held_tokens if computes is decode else 0)
                window_tokens = self._config.decode.max_chunk_tokens if computes is decode else self._prefill_window
                ahead = not computes.prompts.takes_prompt(size, window_tokens)
                return Claim(attempt_id, computes, decode, ticket, journal, need_blocks, self._costs, note_change, ahead=ahead)
            decode.calls.release(ticket.ticket_id)
            decode.outstanding.done(need_blocks)
        return None

    def _by_prompts(self, order: Sequence[str], avoid: Container[str]) -> list[str]:
        """Those that have the least prompt tokens ahead first."""
        found = {worker_id: self._roster.ready_decode(worker_id) for worker_id in order}
        ahead = {worker_id: link.prompt_load().queued_tokens for worker_id, link in found.items() if link is not None}
        return sorted(ahead, key=lambda worker_id: (worker_id in avoid, ahead[worker_id]))

    def _needs_prefill(self, journal: Journal) -> bool:
        """Only prefill workers may compute its prompt."""
        return self._config.disaggregation == "always" and not journal.num_generated

    def _own_tokens(self, journal: Journal) -> int:
        """How much of the prompt must not be taken from decode's cache, since its logits may be wanted there."""
        if self._needs_prefill(journal):
            return 0
        scored = journal.sampling.num_prompt_logprobs is not None and not journal.num_generated
        return len(journal.token_ids) if scored else 1

    def _computes(self, journal: Journal, held_tokens: int, decode: WorkerLink, avoid: Container[str]) -> WorkerLink | None:
        """Who computes a prompt that `decode` decodes: a prefill worker, or itself. None: it has to wait, or does well to."""
        mode, num_tokens = self._config.disaggregation, len(journal.token_ids)
        may_overtake = self._overtaking(journal.scheduling_class.tenant)
        if held_tokens > len(journal.prompt_token_ids):
            return decode  # no prefill worker has any of the answer
        there = None if mode == "never" else self._roster.best_prefill(num_tokens, self._prefill_window, may_overtake, avoid)
        if self._needs_prefill(journal) or (mode == "always" and there is not None):
            return there
        missing, window_tokens = num_tokens - held_tokens, self._config.decode.max_chunk_tokens
        takes = decode.prompts.refused_size is None and decode.prompts.takes_prompt(missing, window_tokens)
        here = decode if takes else None
        if mode != "auto" or not self._roster.ready(Role.PREFILL):
            return here
        if self._prefer_here(num_tokens, held_tokens, decode, avoid):
            return here or there
        # Waiting for the better place holds up whoever comes next.
        return here if there is None and len(self._line) > 1 else there

    def _overtaking(self, tenant: str) -> Callable[[Outstanding], bool] | None:
        """Which prompts one of this tenant's may go before; None if it has more requests in line."""
        if self._line.num_of(tenant) > 1:
            return None
        return lambda outstanding: outstanding.may_be_overtaken(tenant, self._line.num_of)

    def _prefer_here(self, num_tokens: int, held_tokens: int, decode: WorkerLink, avoid: Container[str]) -> bool:
        prefills = self._roster.ready(Role.PREFILL)
        spoilt = all(link.ref.worker_id in avoid for link in prefills)
        if spoilt != (decode.ref.worker_id in avoid):
            return spoilt
        costs = self._costs.lines(asyncio.get_running_loop().time())
        case = Case(
            num_tokens=num_tokens,
            held_tokens=held_tokens,
            ahead_here=decode.prompt_load().queued_tokens,
            ahead_there=min(link.prompt_load().queued_tokens for link in prefills),
            running=decode.report.running if decode.report else 0,
        )
        return costs is not None and prefill_here(case, costs)

    def _refusal(self, journal: Journal) -> TandemError:
        waited_s = self._config.limits.queue_s
        for role in needed_roles(self._config):
            if not self._roster.ready(role):
                return UnavailableError(
                    f"no {role.value} worker came up within {waited_s:g} s", retry_after_s=_RETRY_WHEN_DOWN_S
                )
        retry_after_s = self._line.retry_after_s(journal.scheduling_class)
        return OverloadedError(f"no room within {waited_s:g} s: all workers are full", retry_after_s=retry_after_s)
