"""From a request to a pair of workers with room for it.

    arrive ──► wait in line: at the front, and a pair has room ──► Claim
                  └─► no room in time, or nobody is up ──────────► 429 | 503

A worker's queue is first come, first served, so requests are held back here, where it is known who is due: a prefill worker
gets no more from one router than keeps it busy for a step. Blocks are reserved at the decode worker before any prefill work
is spent. A `Claim` holds what the request has at both workers and gives all of it back when it is left, on every way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container
from types import TracebackType

from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from protocol.messages import FirstToken, Role, Ticket
from protocol.sampling import SamplingParams
from protocol.ticket import reserved_tokens
from router.journal import Journal, Tokens
from router.line import WaitingLine
from router.links import WorkerLink
from router.policy import blocks_for, decode_order, prefill_order
from router.roster import Roster
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_RETRY_WHEN_DOWN_S = 5.0
_IMPATIENCE = 0.25
"""Share of a lease that a decode worker gets to answer while there are others to ask."""

_LEVELS_PER_QUEUE_TIME = 40
"""So many levels of priority what waits may gain: one every 1.5 s by default (`limits.queue_s` / 40)."""


class Claim:
    """A pair of workers and a ticket, for one attempt of one request.

    RESERVED ──► PREFILLED ──► ATTACHED     leaving it releases the ticket, and cancels the prefill unless ATTACHED
    """

    def __init__(
        self,
        attempt_id: str,
        prefill: WorkerLink,
        decode: WorkerLink,
        ticket: Ticket,
        num_tokens: int,
        num_blocks: int,
        on_prefilled: Callable[[], None],
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._attempt_id = attempt_id
        self._ticket = ticket
        self._num_tokens = num_tokens
        self._num_blocks = num_blocks
        self._on_prefilled = on_prefilled
        self._prefilling = True
        self._handed_over = False
        self._stream = decode.open_stream(ticket.ticket_id)
        prefill.book.give(num_tokens)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._prefill_done()
        if not self._handed_over:
            self.prefill.cancel(self._attempt_id)
        self.decode.release(self._ticket.ticket_id)
        self.decode.book.done(self._num_blocks)

    async def first_token(self, journal: Journal) -> FirstToken:
        """Prefill; fails as soon as either worker is lost, for without its ticket the prefill is worth nothing."""
        asking = asyncio.ensure_future(
            self.prefill.prefill(
                self._attempt_id,
                self._ticket,
                journal.token_ids,
                journal.num_generated,
                journal.sampling,
                journal.cache_salt,
            )
        )
        try:
            await asyncio.wait((asking, self.decode.gone), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self.decode.lost_error()
            self._prefill_done()
            return asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, TandemError):
                    await asking

    def finished(self) -> None:
        """The first token was the last: prefill hands nothing over."""
        self._handed_over = True

    async def attach(self, first_token: int, sampling: SamplingParams, num_generated: int) -> None:
        """Start the decode; returns when the KV is there and was checked. Raises KvTransferError, WorkerLostError."""
        await self.decode.attach(self._ticket.ticket_id, first_token, sampling, num_generated)
        self._handed_over = True

    async def tokens(self) -> Tokens:
        """What the decode worker made since the last call. Raises what ends the stream without a finish reason."""
        return await self._stream.take()

    def _prefill_done(self) -> None:
        if self._prefilling:
            self._prefilling = False
            self.prefill.book.done(self._num_tokens)
            self._on_prefilled()


class Admission:
    """Chooses pairs, reserves, and lets wait whom there is no room for."""

    def __init__(self, config: ClusterConfig, roster: Roster, metrics: Metrics) -> None:
        self._config = config
        self._roster = roster
        self._line = WaitingLine(config.limits.max_waiting_requests, config.limits.queue_s / _LEVELS_PER_QUEUE_TIME)
        metrics.waiting_requests.set_function(lambda: len(self._line))

    async def admit(self, attempt_id: str, journal: Journal, deadline: float, *, resumed: bool, avoid: Container[str]) -> Claim:
        """A pair with room for what is left of the request; the caller leaves the Claim. Workers in `avoid` come last.

        Raises InvalidRequestError when no worker's pool could ever hold it; OverloadedError when too many wait already, or
        no room came until `deadline` (the loop's time), or none would at the present pace; UnavailableError when no worker of
        a role was up until then.
        """
        self.check_possible(len(journal.token_ids), journal.remaining_tokens)
        try:
            with self._line.place(journal.standing, self._cost(journal), deadline, ahead=resumed) as place:
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
        """Raise InvalidRequestError if the request is larger than the largest pool of either role.

        `prompt_param` is the field that holds the prompt. Pools have the configuration's size until a worker has reported.
        """
        prefill_room, decode_room = (self.pool_tokens(role) for role in (Role.PREFILL, Role.DECODE))
        if num_prompt_tokens > prefill_room:
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
        reports = (link.report for link in self._roster.ready(role))
        sizes = [report.total_blocks for report in reports if report is not None]
        pool = self._config.prefill if role is Role.PREFILL else self._config.decode
        return (max(sizes) if sizes else pool.kv_cache_tokens // block_size) * block_size

    def _cost(self, journal: Journal) -> int:
        """Tokens that a claim takes at once: those to prefill, and the answer's first room."""
        return reserved_tokens(len(journal.token_ids), journal.remaining_tokens, self._config.answer_room)

    async def _try(self, attempt_id: str, journal: Journal, avoid: Container[str]) -> Claim | None:
        """A claim if some pair has room now. Decode workers are asked in turn, the one with the most room first."""
        num_tokens = len(journal.token_ids)
        need_blocks = blocks_for(self._cost(journal), self._config.block_size)
        decodes = {link.ref.worker_id: link for link in self._roster.ready(Role.DECODE)}
        order = decode_order((link.load() for link in decodes.values()), need_blocks, avoid)
        for worker_id in order:
            if self._best_prefill(num_tokens, avoid) is None:
                return None
            decode = decodes[worker_id]
            lease_s = self._config.limits.lease_s
            patience_s = lease_s if worker_id == order[-1] else _IMPATIENCE * lease_s
            ticket = await self._reserve(decode, attempt_id, journal, need_blocks, patience_s)
            if ticket is None:
                continue
            prefill = self._best_prefill(num_tokens, avoid)
            if prefill is not None:
                return Claim(attempt_id, prefill, decode, ticket, num_tokens, need_blocks, self._roster.note_change)
            decode.release(ticket.ticket_id)
            decode.book.done(need_blocks)
        return None

    async def _reserve(
        self, decode: WorkerLink, attempt_id: str, journal: Journal, need_blocks: int, patience_s: float
    ) -> Ticket | None:
        """Blocks at this worker, or None if it is full, slow to answer, leaving or lost."""
        ticket = None
        decode.book.give(need_blocks)
        try:
            ticket = await decode.reserve(
                attempt_id, journal.token_ids, journal.remaining_tokens, journal.cache_salt, patience_s
            )
        except OverloadedError:
            decode.book.refuse(need_blocks)
        except UnavailableError as error:
            decode.book.refuse(0)
            log.info("no reservation: %s", error.message)
        finally:
            if ticket is None:
                decode.book.done(need_blocks)
        return ticket

    def _best_prefill(self, num_tokens: int, avoid: Container[str]) -> WorkerLink | None:
        links = {link.ref.worker_id: link for link in self._roster.ready(Role.PREFILL)}
        window_tokens = self._config.prefill.max_batch_tokens
        order = prefill_order((link.load() for link in links.values()), num_tokens, window_tokens, avoid)
        return links[order[0]] if order else None

    def _refusal(self, journal: Journal) -> TandemError:
        waited_s = self._config.limits.queue_s
        for role in (Role.PREFILL, Role.DECODE):
            if not self._roster.ready(role):
                return UnavailableError(
                    f"no {role.value} worker came up within {waited_s:g} s", retry_after_s=_RETRY_WHEN_DOWN_S
                )
        retry_after_s = self._line.retry_after_s(journal.standing)
        return OverloadedError(f"no room within {waited_s:g} s: all workers are full", retry_after_s=retry_after_s)
