"""What one attempt of one request holds: a pair of workers and a ticket, or a decode worker that computes the prompt, too.

    RESERVED ──► PREFILLED ──► ATTACHED ──► moved to another decode worker, any number of times
        └──── computed there ─────┘

Leaving a claim releases the ticket, wherever it is by then, and cancels the prefill unless the stream was attached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from protocol.errors import OverloadedError, ProtocolError, TandemError
from protocol.messages.decode import Prefilled
from protocol.messages.load import FAILED_LATE_S, Brought
from protocol.messages.prefill import FetchFrom, FirstToken, Prefill
from protocol.messages.workers import WorkerLife
from protocol.sampling import FinishReason, SamplingParams, TokenLogprobs
from router.dispatch.journal import Journal, KvCopy, Tokens
from router.dispatch.links import WorkerLink
from router.dispatch.reservation import Reservation, Room, reserve
from router.rules.caching.reach import NotLending
from router.rules.disaggregation import PrefillCosts
from router.rules.pace import PaceMeter
from router.rules.pair import Reason

_DECODE_SAYS_S = 1.0
"""Seconds that a decode worker has to say that a handoff has failed, or to be lost. Then prefill's word counts, or its loss."""


@dataclass(frozen=True)
class First:
    """The first token of an attempt, and how its prompt was computed."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prefilled: Prefilled


@dataclass(frozen=True)
class Placed:
    """How a prompt came to the worker that computes it."""

    reason: Reason
    fetch: FetchFrom | None
    """Blocks that the worker fetches from another one before it computes; None if it fetches none."""
    not_lending: NotLending
    """Notes a worker from which nothing came."""


class PromptWork:
    """A prompt at the worker that computes it. It counts among the worker's outstanding prompts until `done`."""

    def __init__(self, link: WorkerLink, num_tokens: int, tenant: str, on_done: Callable[[], None], *, ahead: bool) -> None:
        """`num_tokens` are to be computed, as far as is known, `ahead` of the prompts that are there.

        `on_done` is called once.
        """
        self.link = link
        self.ahead = ahead
        self.waits = link.load().queued_tokens > 0
        """Other prompts were there when it came."""
        self.num_tokens = num_tokens
        self._tenant = tenant
        self._on_done = on_done
        self._is_done = False
        link.prompts.give_prompt(num_tokens, tenant, ahead=ahead)

    def refused(self) -> None:
        """Note that the queue of the worker is full."""
        self.link.prompts.refuse(self.num_tokens)

    def done(self) -> None:
        """Note that the worker is done with it, or will not compute it; idempotent."""
        if not self._is_done:
            self._is_done = True
            self.link.prompts.prompt_done(self.num_tokens, self._tenant)
            self._on_done()


class Claim:
    """What an attempt holds, from its reservation on. A context manager that gives all of it back.

    A prefill worker computes the prompt, or the decode worker itself.
    """

    def __init__(
        self,
        attempt_id: str,
        reservation: Reservation,
        prompt: PromptWork,
        journal: Journal,
        costs: PrefillCosts,
        pace: PaceMeter,
        placed: Placed,
    ) -> None:
        """`costs` learns what it took to compute, fetch and hand over the prompt, and `pace` how long the answer was."""
        self.placed = placed
        self.here = prompt.link is reservation.decode
        """The decode worker computes the prompt."""
        self._attempt_id = attempt_id
        self._reservation = reservation
        self._prompt = prompt
        self._num_tokens = journal.num_tokens
        self._costs = costs
        self._pace = pace
        self._attaching = False
        self._handed_over = False
        self._began = time.monotonic()
        alone = not prompt.waits and placed.fetch is None
        self._under_way = costs.begun(self.here, prompt.num_tokens, self._began) if alone else None
        """The prompt, while it speaks for how long such prompts take: it waits for nothing but its own computation."""
        self._handoff: int | None = None
        """The call that asked the prefill worker for it."""
        self._handoff_failure: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()
        self._stream = reservation.decode.streams.open(reservation.ticket.ticket_id)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._prompt.done()
        self._end_prompt(answered=False)
        if self._handoff is not None:
            self.computes.calls.forget_handoff(self._handoff)
        if not self._handed_over and not self.here:
            self.computes.calls.cancel(self._attempt_id)
        self._reservation.release()

    @property
    def computes(self) -> WorkerLink:
        """The worker that computes the prompt: a prefill worker, or the decode worker itself."""
        return self._prompt.link

    @property
    def decode(self) -> WorkerLink:
        """The worker that decodes the stream now."""
        return self._reservation.decode

    @property
    def ended(self) -> bool:
        """No more tokens will come than have arrived."""
        return self._stream.ended

    @property
    def decoded(self) -> bool:
        """A decode worker made a token of the answer in this attempt."""
        return self._stream.begun

    @property
    def killed(self) -> WorkerLife | None:
        """The life of the worker that was computing the request, if it died and had made no token of it; otherwise None."""
        turn = self.decode if self._attaching else self.computes
        return None if self.decoded or not turn.died else turn.life

    @property
    def workers(self) -> list[WorkerLink]:
        """The workers of the attempt: one if decode computed the prompt and has not moved, otherwise two."""
        return [self.decode] if self.computes is self.decode else [self.computes, self.decode]

    @property
    def deaths(self) -> dict[WorkerLife, float]:
        """The lives of its workers that have ended, and when, by `time.monotonic`. The prefill worker's may be long ago."""
        return {link.life: link.died_at for link in self.workers if link.died_at is not None}

    @property
    def given_up(self) -> bool:
        """One of its workers, which lives, has given this router up."""
        return any(link.given_up for link in self.workers)

    @property
    def lost(self) -> set[str]:
        """The ids of its workers that are lost."""
        return {link.ref.worker_id for link in self.workers if link.gone.done()}

    @property
    def age_s(self) -> float:
        """Seconds since the pair was chosen."""
        return time.monotonic() - self._began

    async def first_token(self, journal: Journal) -> First:
        """Have the prompt computed, here or there, and return the token that follows it.

        Fails as soon as a worker is lost, for without its ticket the prefill is worth nothing.
        """
        began = time.monotonic()
        first = await (self._first_here(journal) if self.here else self._first_there(journal))
        now, prefilled = time.monotonic(), first.prefilled
        took_s = prefilled.prefill_s if self._prompt.waits else now - began - prefilled.brought.seconds
        self._note_fetched(prefilled.brought, now)
        self._end_prompt(answered=True)
        self._costs.prefilled(self.here, self._num_tokens - prefilled.cached_tokens, took_s, now)
        return first

    def _end_prompt(self, *, answered: bool) -> None:
        """Note that the prompt is not under way any more. A worker that is lost says nothing of how long prompts take."""
        if self._under_way is None:
            return
        if answered or self.computes.gone.done():
            self._costs.ended(self._under_way)
        else:
            self._costs.left(self._under_way, time.monotonic())
        self._under_way = None

    def _note_fetched(self, brought: Brought, now: float) -> None:
        if brought.peer_tokens:
            self._costs.fetched(brought.peer_tokens, brought.peer_s, now)
        elif self.placed.fetch is not None and brought.peer_s > FAILED_LATE_S:
            self.placed.not_lending.note(self.placed.fetch.worker.worker_id, now)

    async def _first_here(self, journal: Journal) -> First:
        await self.decode.calls.attach(self._reservation.ticket.ticket_id, None, journal.sampling, journal.num_generated)
        output = await self._stream.take_first()
        self._prompt.done()
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
        asking = asyncio.ensure_future(self.computes.calls.prefill(lambda call_id: self._question(call_id, journal)))
        try:
            await asyncio.wait((asking, self.decode.gone), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self.decode.connection.lost_error()
            self._prompt.done()
            return _first(asking.result())
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    def _question(self, call_id: int, journal: Journal) -> Prefill:
        self._handoff = call_id
        self.computes.calls.follow_handoff(call_id, self._note_handoff_failure)
        return Prefill(
            call_id=call_id,
            request_id=self._attempt_id,
            ticket=self._reservation.ticket,
            token_ids=journal.token_ids,
            num_generated=journal.num_generated,
            sampling=journal.sampling,
            cache_salt=journal.cache_salt,
            trace=journal.trace,
            ahead=self._prompt.ahead,
            fetch=self.placed.fetch,
        )

    def _note_handoff_failure(self, error: TandemError) -> None:
        if not self._handoff_failure.done():
            self._handoff_failure.set_result(error)

    def refused(self) -> None:
        """Note that the queue of the prefill worker is full."""
        self._prompt.refused()

    def answered(self, num_tokens: int) -> None:
        """Note that the answer has come to its end with so many tokens."""
        self._pace.answered(num_tokens, time.monotonic())

    def finished(self) -> None:
        """Note that the first token was the last, so that prefill hands nothing over."""
        self._handed_over = True

    async def attach(self, first_token: int, sampling: SamplingParams, num_generated: int) -> float:
        """Start the decode, unless the prompt was computed there. Returns when the KV is there and was checked; the result is
        how long decode waited for it, in seconds.

        Raises KvTransferError, WorkerLostError.
        """
        waited_s = 0.0
        if not self.here:
            self._attaching = True
            began = time.monotonic()
            waited_s = await self._attach_there(first_token, sampling, num_generated)
            now = time.monotonic()
            self._costs.handed_over(self._num_tokens - self._reservation.ticket.held_tokens, now - began, now)
        self._handed_over = True
        return waited_s

    async def _attach_there(self, first_token: int, sampling: SamplingParams, num_generated: int) -> float:
        """Attach the stream at the decode worker, and wait for its KV however long that takes.

        Where prefill is lost or can't send, the decode worker has a moment to say so itself. It may have heard nothing, for the
        two may not reach each other.
        """
        attach = self.decode.calls.attach(self._reservation.ticket.ticket_id, first_token, sampling, num_generated)
        attaching = asyncio.ensure_future(attach)
        try:
            ends = (attaching, self._handoff_failure, self.computes.gone)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((attaching,), timeout=_DECODE_SAYS_S)
            if attaching.done():
                return attaching.result()
            if self._handoff_failure.done():
                raise self._handoff_failure.result()
            raise self.computes.connection.lost_error()
        finally:
            if not attaching.done():
                attaching.cancel()
                await asyncio.gather(attaching, return_exceptions=True)

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
        there = await reserve(target, self._attempt_id, journal, room, patience_s)
        if there is None:
            raise OverloadedError(f"{target.ref.worker_id} has no room for the stream")
        ticket_id = there.ticket.ticket_id
        try:
            target.streams.open(ticket_id)
            moved = await self.decode.calls.migrate(self._reservation.ticket.ticket_id, there.ticket)
        except BaseException:
            there.release()
            raise
        journal.copy = KvCopy(self.decode.life, len(room.token_ids))  # what has left there stays in its cache
        self._reservation.release()
        self._reservation = there
        self._stream.on_next(on_gap)
        target.streams.adopt(ticket_id, self._stream)
        try:
            await target.calls.attach(ticket_id, moved.newest_token, journal.sampling, moved.num_generated)
        except TandemError as error:
            self._stream.fail(error)
            raise

    async def copy(self, target: WorkerLink, journal: Journal, room: Room, patience_s: float) -> None:
        """Have the KV of the attached stream's first tokens, those of `room`, in the cache of another worker as well.

        Raises OverloadedError or UnavailableError; the stream goes on in any case.
        """
        there = await reserve(target, self._attempt_id, journal, room, patience_s)
        if there is None:
            raise OverloadedError(f"{target.ref.worker_id} has no room for a copy")
        try:
            target.streams.open(there.ticket.ticket_id)
            if there.ticket.held_tokens < len(room.token_ids):
                await self.decode.calls.copy(self._reservation.ticket.ticket_id, there.ticket)
        finally:
            there.release()


def _first(answer: FirstToken) -> First:
    return First(
        token_id=answer.token_id,
        logprobs=answer.logprobs,
        finish_reason=answer.finish_reason,
        prefilled=answer.prefilled,
    )
