"""What a router asks of one worker, and for how long it waits for each answer.

    of a decode worker:     reserve ──► attach ──► migrate | copy ──► release
    of a prefill worker:    prefill ──► cancel
    of both:                audit, reset_cache

Every call raises WorkerLostError when the connection is lost meanwhile, and ProtocolError when the answer is of the wrong kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from protocol.audit import Audit, Books
from protocol.cache.reset import CacheErased, CacheReset
from protocol.endpoint import answer_within
from protocol.errors import ProtocolError, TandemError, UnavailableError
from protocol.messages.common import Failed
from protocol.messages.decode import Attach, Attached, Copied, Copy, Migrate, Migrated, Release, Reserve, Reserved
from protocol.messages.prefill import Cancel, FirstToken, Prefill
from protocol.messages.workers import Ticket
from protocol.sampling import SamplingParams
from router.dispatch.connection import Connection
from router.dispatch.streams import OpenStreams

_LONGEST_PREFILL_S = 4 * 3600.0
"""Last resort: a prefill worker that works is waited for, one that doesn't is noticed by its link long before. A prompt of 128k
tokens of a small model takes an hour of one core, and twice that beside short ones."""

_LONGEST_HOLD_S = 24 * 3600.0
"""Last resort: so long may this process be held while it waits for a ticket."""

_LONGEST_ATTACH_S = 3600.0
"""Last resort: a worker that can't send says so, and one that sends takes as long as its KV needs."""

SEND_LEASES = 6
"""Number of leases in which a stream has its turn and is sent. A source that could not says so sooner."""

_Answer = TypeVar("_Answer")


class WorkerCalls:
    """The questions to one worker over one connection. Each method says which role it is for."""

    def __init__(self, connection: Connection, streams: OpenStreams, lease_s: float) -> None:
        self.num_prefills = 0
        """Prompts that the worker was asked to compute, and has not answered."""
        self._connection = connection
        self._streams = streams
        self._lease_s = lease_s
        self._late: set[asyncio.Future[Ticket]] = set()
        self._handoffs: dict[int, Callable[[TandemError], None]] = {}
        """Who wants to know if a handoff fails after the prompt's first token has come, by the call that asked for it."""

    async def reserve(self, build: Callable[[int], Reserve], patience_s: float) -> Ticket:
        """Ask a decode worker for blocks; `build` makes the question of its call id. The caller releases the ticket.

        Raises OverloadedError when it is full, UnavailableError when it didn't answer within `patience_s`.
        """
        asking = asyncio.ensure_future(self._ask_for_ticket(build))
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            self._leave_to_itself(asking)
            raise UnavailableError(f"{self._worker_id} did not answer within {patience_s:g} s") from None
        except asyncio.CancelledError:
            self._leave_to_itself(asking)
            raise

    async def attach(self, ticket_id: int, first_token: int | None, sampling: SamplingParams, num_generated: int) -> float:
        """Let a ticket's sequence join the batch of a decode worker; waits for the commit, and returns how long the worker
        did, in seconds. Without a first token the worker computes the prompt. The caller watches who sends the KV.

        Raises KvTransferError.
        """
        answer = await self._connection.ask(
            lambda call_id: Attach(
                call_id=call_id,
                ticket_id=ticket_id,
                first_token=first_token,
                sampling=sampling,
                num_generated=num_generated,
            ),
            _LONGEST_ATTACH_S,
        )
        waited_s = self._expect(answer, Attached).waited_s
        self._connection.progress_at = time.monotonic()
        self._streams.note_attached(ticket_id)
        return waited_s

    async def migrate(self, ticket_id: int, target: Ticket) -> Migrated:
        """Have a decode worker hand a stream over to another; returns when all its tokens are here and its KV is there.

        Raises the worker's refusal: then it goes on with the stream. Raises UnavailableError if it didn't answer: then the
        stream has failed, for nobody knows where it is.
        """
        deadline_s = SEND_LEASES * self._lease_s
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._connection.ask(lambda call_id: Migrate(call_id, ticket_id, target), 2 * deadline_s)
        except TimeoutError:
            error = UnavailableError(f"{self._worker_id} did not hand the stream over within {deadline_s:g} s")
            self._streams.fail(ticket_id, error)
            raise error from None
        return self._expect(answer, Migrated)

    async def copy(self, ticket_id: int, target: Ticket) -> None:
        """Have a decode worker send a stream's KV to another as well; returns when it is there.

        Raises the worker's refusal, or UnavailableError if it didn't answer. Neither touches the stream.
        """
        deadline_s = SEND_LEASES * self._lease_s
        answer = await self._connection.ask(lambda call_id: Copy(call_id, ticket_id, target), deadline_s)
        self._expect(answer, Copied)

    def release(self, ticket_id: int) -> None:
        """Give a decode worker's ticket back and close its stream; idempotent, also when the worker is gone."""
        self._streams.close(ticket_id)
        self._connection.tell(Release(ticket_id))

    async def prefill(self, build: Callable[[int], Prefill]) -> FirstToken:
        """Have a prefill worker compute a prompt and push its KV to the ticket; `build` makes the question of its call id.
        Whoever gives up calls `cancel`.

        Raises what the worker answers: OverloadedError for a full queue, KvTransferError.
        """
        if not self.num_prefills:
            self._connection.progress_at = time.monotonic()
        self.num_prefills += 1
        try:
            return self._expect(await self._connection.ask(build, _LONGEST_PREFILL_S), FirstToken)
        finally:
            self.num_prefills -= 1

    def follow_handoff(self, call_id: int, on_failure: Callable[[TandemError], None]) -> None:
        """Have `on_failure` told, until `forget_handoff`, if a prefill worker can't hand over what it has computed."""
        self._handoffs[call_id] = on_failure

    def forget_handoff(self, call_id: int) -> None:
        """Nobody wants to know any more what becomes of that handoff; idempotent."""
        self._handoffs.pop(call_id, None)

    def failed_late(self, failure: Failed) -> None:
        """Take what a worker says of a call that it has answered before: a handoff has failed, if anybody follows it."""
        told = self._handoffs.get(failure.call_id)
        if told is not None:
            told(failure.to_error())

    def cancel(self, request_id: str) -> None:
        """Stop a prefill; idempotent, also when the worker is gone."""
        self._connection.tell(Cancel(request_id))

    async def audit(self, patience_s: float) -> Books:
        """The worker's books. Raises UnavailableError when it does not answer in time (seconds)."""
        return self._expect(await self._connection.ask(Audit, patience_s), Books)

    async def reset_cache(self, tenant: str | None, patience_s: float) -> CacheErased:
        """Have the worker erase a tenant's cached KV, or everybody's. Raises UnavailableError if some may be left."""
        return self._expect(await self._connection.ask(lambda call_id: CacheReset(call_id, tenant), patience_s), CacheErased)

    async def settle(self) -> None:
        """Wait for the reservations that nobody waits for any more. Call it once the connection is lost: then they end."""
        await asyncio.gather(*self._late, return_exceptions=True)

    @property
    def _worker_id(self) -> str:
        return self._connection.ref.worker_id

    def _expect(self, answer: Any, kind: type[_Answer]) -> _Answer:
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self._worker_id} answered with {type(answer).__name__} where {kind.__name__} was due")
        return answer

    async def _ask_for_ticket(self, build: Callable[[int], Reserve]) -> Ticket:
        """A worker that doesn't answer within a lease is lost: our heartbeats would keep a ticket that we never heard of.

        Time in which this process was held does not count: the answer may lie unread.
        """
        try:
            asking = self._connection.ask(build, _LONGEST_HOLD_S)
            return self._expect(await answer_within(self._lease_s, asking), Reserved).ticket
        except TimeoutError:
            self._connection.lose(f"it did not answer within {self._lease_s:g} s")
            raise self._connection.lost_error() from None

    def _leave_to_itself(self, asking: asyncio.Future[Ticket]) -> None:
        """The request went elsewhere or its client left; should the ticket be granted after all, it is given back."""
        self._late.add(asking)
        asking.add_done_callback(self._give_back_late)

    def _give_back_late(self, asking: asyncio.Future[Ticket]) -> None:
        self._late.discard(asking)
        if not asking.cancelled() and asking.exception() is None:
            self.release(asking.result().ticket_id)
