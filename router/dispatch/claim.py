"""What one attempt of one request holds: a pair of workers and a ticket, or a decode worker that computes the prompt, too.

    RESERVED ──► PREFILLED ──► ATTACHED ──► moved to another decode worker, any number of times
        └──── computed there ─────┘

Leaving a claim releases the ticket, wherever it is by then, and cancels the prefill unless the stream was attached.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from protocol.errors import OverloadedError, ProtocolError, TandemError, UnavailableError
from protocol.messages import FirstToken, Prefill, Prefilled, Reserve, Ticket, WorkerLife
from protocol.sampling import FinishReason, SamplingParams, TokenLogprobs
from router.dispatch.journal import Journal, KvCopy, Tokens
from router.dispatch.links import WorkerLink
from router.rules.disaggregation import PrefillCosts
from telemetry.logging import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """What is wanted of a decode worker for one choice; the rest as in `protocol.messages.Reserve`."""

    token_ids: tuple[int, ...]
    max_tokens: int
    num_blocks: int
    """For all of these tokens and the answer's beginning."""
    own_tokens: int = 0


async def reserve(decode: WorkerLink, attempt_id: str, journal: Journal, room: Room, patience_s: float) -> Ticket | None:
    """Blocks at this worker, counted as outstanding there; None if it is full, slow to answer, leaving or lost."""
    ticket = None
    decode.outstanding.give(room.num_blocks)
    try:
        ticket = await decode.calls.reserve(
            lambda call_id: Reserve(
                call_id=call_id,
                request_id=attempt_id,
                prompt_token_ids=room.token_ids,
                max_tokens=room.max_tokens,
                cache_salt=journal.cache_salt,
                trace=journal.trace,
                own_tokens=room.own_tokens,
            ),
            patience_s,
        )
    except OverloadedError:
        decode.outstanding.refuse(room.num_blocks)
    except UnavailableError as error:
        decode.outstanding.refuse(0)
        log.info("no reservation: %s", error.message, extra=fields(trace=journal.trace.trace_id))
    finally:
        if ticket is None:
            decode.outstanding.done(room.num_blocks)
    return ticket


@dataclass(frozen=True)
class First:
    """The first token of an attempt, and how its prompt was computed."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prefilled: Prefilled


class Claim:
    """Made with what was reserved. `computes` is who computes the prompt: a prefill worker, or the decode worker itself.

    It does so `ahead` of the prompts that are there. `costs` learns what that took; `on_prefilled` is called when it is done.
    """

    def __init__(
        self,
        attempt_id: str,
        computes: WorkerLink,
        decode: WorkerLink,
        ticket: Ticket,
        journal: Journal,
        num_blocks: int,
        costs: PrefillCosts,
        on_prefilled: Callable[[], None],
        *,
        ahead: bool,
    ) -> None:
        self.computes = computes
        self.decode = decode
        self.here = computes is decode
        self._attempt_id = attempt_id
        self._ticket = ticket
        self._num_tokens = len(journal.token_ids)
        self._num_missing = self._num_tokens - (ticket.held_tokens if self.here else 0)
        """What is to be computed of them, as far as is known."""
        self._tenant = journal.scheduling_class.tenant
        self._ahead = ahead
        self._num_blocks = num_blocks
        self._costs = costs
        self._on_prefilled = on_prefilled
        self._prefilling = True
        self._attaching = False
        self._handed_over = False
        self._stream = decode.streams.open(ticket.ticket_id)
        self._waits = computes.load().queued_tokens > 0
        computes.prompts.give_prompt(self._num_missing, self._tenant, ahead=ahead)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._prefill_done()
        if not self._handed_over and not self.here:
            self.computes.calls.cancel(self._attempt_id)
        self._leave_decode()

    @property
    def ended(self) -> bool:
        """No more tokens will come than are here."""
        return self._stream.ended

    @property
    def decoded(self) -> bool:
        """A decode worker made a token of it, in this attempt."""
        return self._stream.begun

    @property
    def killed(self) -> WorkerLife | None:
        """The worker whose turn it was, if it died and had made nothing of it yet."""
        turn = self.decode if self._attaching else self.computes
        return None if self.decoded or not turn.died else turn.life

    @property
    def workers(self) -> list[WorkerLink]:
        """One or two."""
        return [self.decode] if self.computes is self.decode else [self.computes, self.decode]

    @property
    def deaths(self) -> list[WorkerLife]:
        """Of its workers."""
        return [link.life for link in self.workers if link.died]

    @property
    def lost(self) -> set[str]:
        """Which of its workers are."""
        return {link.ref.worker_id for link in self.workers if link.gone.done()}

    async def first_token(self, journal: Journal) -> First:
        """Prefill, here or there; fails as soon as a worker is lost, for without its ticket the prefill is worth nothing."""
        began = time.monotonic()
        first = await (self._first_here(journal) if self.here else self._first_there(journal))
        now, prefilled = time.monotonic(), first.prefilled
        took_s = prefilled.prefill_s if self._waits else now - began
        self._costs.prefilled(self.here, self._num_tokens - prefilled.cached_tokens, took_s, now)
        return first

    async def _first_here(self, journal: Journal) -> First:
        await self.decode.calls.attach(self._ticket.ticket_id, None, journal.sampling, journal.num_generated)
        output = await self._stream.take_first()
        self._prefill_done()
        if output.prefilled is None or len(output.token_ids) != 1:
            raise ProtocolError(f"{self.decode.ref.worker_id} did not say how it computed the prompt")
        logprobs = output.logprobs[0] if output.logprobs else None
        return First(
            token_id=output.token_ids[0],
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            prefilled=output.prefilled,
        )

    async def _first_there(self, journal: Journal) -> First:
        asking = asyncio.ensure_future(
            self.computes.calls.prefill(
                lambda call_id: Prefill(
                    call_id=call_id,
                    request_id=self._attempt_id,
                    ticket=self._ticket,
                    token_ids=journal.token_ids,
                    num_generated=journal.num_generated,
                    sampling=journal.sampling,
                    cache_salt=journal.cache_salt,
                    trace=journal.trace,
                    ahead=self._ahead,
                )
            )
        )
        try:
            await asyncio.wait((asking, self.decode.gone), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self.decode.connection.lost_error()
            self._prefill_done()
            return _first(asking.result())
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, TandemError):
                    await asking

    def refused(self) -> None:
        """The queue of the prefill worker is full."""
        self.computes.prompts.refuse(self._num_missing)

    def finished(self) -> None:
        """The first token was the last: prefill hands nothing over."""
        self._handed_over = True

    async def attach(self, first_token: int, sampling: SamplingParams, num_generated: int) -> float:
        """Start the decode, unless the prompt was computed there; returns when the KV is there and was checked, with how long
        decode waited for it, in seconds.

        Raises KvTransferError, WorkerLostError.
        """
        waited_s = 0.0
        if not self.here:
            self._attaching = True
            began = time.monotonic()
            waited_s = await self.decode.calls.attach(self._ticket.ticket_id, first_token, sampling, num_generated)
            now = time.monotonic()
            self._costs.handed_over(self._num_tokens - self._ticket.held_tokens, now - began, now)
        self._handed_over = True
        return waited_s

    def tokens(self) -> Awaitable[Tokens]:
        """What the decode worker made since the last call. Raises what ends the stream without a finish reason."""
        return self._stream.take()  # not awaited here: that costs every token one coroutine more

    async def move(
        self, target: WorkerLink, journal: Journal, num_blocks: int, patience_s: float, on_gap: Callable[[float], None]
    ) -> None:
        """Let this worker go on with the attached stream; returns when it does. `on_gap` is told how long the stream paused.

        Raises OverloadedError or UnavailableError; then the stream is where it was, or has failed and is to be resumed. If the
        claim is left meanwhile, cancel this.
        """
        # Of the newest token no KV was computed yet: it plays the part of the first one.
        room = Room(journal.token_ids[:-1], journal.remaining_tokens + 1, num_blocks)
        ticket = await reserve(target, self._attempt_id, journal, room, patience_s)
        if ticket is None:
            raise OverloadedError(f"{target.ref.worker_id} has no room for the stream")
        try:
            target.streams.open(ticket.ticket_id)
            moved = await self.decode.calls.migrate(self._ticket.ticket_id, ticket)
        except BaseException:
            target.calls.release(ticket.ticket_id)
            target.outstanding.done(num_blocks)
            raise
        journal.copy = KvCopy(self.decode.life, len(room.token_ids))  # what has left there stays in its cache
        self._leave_decode()
        self.decode, self._ticket, self._num_blocks = target, ticket, num_blocks
        self._stream.on_next(on_gap)
        target.streams.adopt(ticket.ticket_id, self._stream)
        try:
            await target.calls.attach(ticket.ticket_id, moved.newest_token, journal.sampling, moved.num_generated)
        except TandemError as error:
            self._stream.fail(error)
            raise

    async def copy(self, target: WorkerLink, journal: Journal, room: Room, patience_s: float) -> None:
        """Have the KV of the attached stream's first tokens, those of `room`, in the cache of another worker as well.

        Raises OverloadedError or UnavailableError; the stream goes on in any case.
        """
        ticket = await reserve(target, self._attempt_id, journal, room, patience_s)
        if ticket is None:
            raise OverloadedError(f"{target.ref.worker_id} has no room for a copy")
        try:
            target.streams.open(ticket.ticket_id)
            if ticket.held_tokens < len(room.token_ids):
                await self.decode.calls.copy(self._ticket.ticket_id, ticket)
        finally:
            target.calls.release(ticket.ticket_id)
            target.outstanding.done(room.num_blocks)

    def _leave_decode(self) -> None:
        self.decode.calls.release(self._ticket.ticket_id)
        self.decode.outstanding.done(self._num_blocks)

    def _prefill_done(self) -> None:
        if self._prefilling:
            self._prefilling = False
            self.computes.prompts.prompt_done(self._num_missing, self._tenant)
            self._on_prefilled()


def _first(answer: FirstToken) -> First:
    return First(
        token_id=answer.token_id,
        logprobs=answer.logprobs,
        finish_reason=answer.finish_reason,
        prefilled=answer.prefilled,
    )
