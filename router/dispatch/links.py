"""One authenticated connection to one life of one worker.

    LIVE ──► LOST      the connection broke, the worker was silent for `lease_s`, made no step for six leases
                       though it owed us tokens, answered as another life, or the link was closed

A link lives as long as its `run`. When that ends every open question and every stream fails with WorkerLostError at once;
a new connection is a new link (`router.dispatch.roster` makes it). Blocks of tickets that the worker granted are given back by
whoever holds the ticket; an answer that comes after its asker went away is given back here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from configs.schema import LimitsConfig
from protocol.audit import Audit, DecodeBooks, PrefillBooks
from protocol.calls import CallClient
from protocol.errors import ProtocolError, UnavailableError, WorkerLostError
from protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Copied,
    Copy,
    FirstToken,
    LoadReport,
    Migrate,
    Migrated,
    Ping,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Role,
    Ticket,
    TokenFrame,
    WorkerLife,
    WorkerRef,
)
from protocol.sampling import SamplingParams
from protocol.trace import TraceContext
from protocol.wire import WireClient
from router.dispatch.journal import Arrival
from router.dispatch.streams import TokenStream
from router.rules.worker_load import Outstanding, WorkerLoad

log = logging.getLogger(__name__)

_LONGEST_PREFILL_S = 3600.0
"""Last resort: a prefill worker that works is waited for, one that doesn't is noticed by its link long before."""

_STALL_LEASES = 6
"""So long may a worker that reports, but makes no step, keep what waits for it: a step may be long, but not this long."""

_SEND_LEASES = 6
"""So long may a stream wait for its turn and be sent: each of its pushes has a lease."""

_Answer = TypeVar("_Answer")


class WorkerLink:
    """The router's side of one connection. `run` owns the client and must be awaited; the rest is only for meanwhile."""

    def __init__(
        self,
        ref: WorkerRef,
        client: WireClient,
        limits: LimitsConfig,
        on_load: Callable[[], None],
        on_report: Callable[[], None],
    ) -> None:
        """`on_load` is called when anything that is known of the worker's load changes, and when the link is lost;
        `on_report` when a report has arrived."""
        self.ref = ref
        self.outstanding = Outstanding(on_change=on_load)
        """Of claims: in prompt tokens at a prefill worker, in KV blocks at a decode worker."""
        self.prompts = self.outstanding if ref.role is Role.PREFILL else Outstanding(on_change=on_load)
        """Of prompts that are computed there, in tokens."""
        self.report: LoadReport | None = None
        self.retired = False
        """The worker is no longer part of the cluster: the link ends with its last request."""
        self._limits = limits
        self._on_load = on_load
        self._on_report = on_report
        self._caller = CallClient(client, self._on_message)
        self._streams: dict[int, TokenStream] = {}
        self._num_prefills = 0
        self._late: set[asyncio.Future[Ticket]] = set()
        self._heard_at = self._progress_at = time.monotonic()
        self._reported_at = 0.0
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the link is lost."""
        self.died = False
        """It is lost because the connection broke, as it does when the worker's process ends."""

    async def run(self) -> str:
        """Serve until the link is lost, and say why it was. Cancelling it closes the link."""
        reading = asyncio.create_task(self._caller.run())
        beating = asyncio.create_task(self._beat())
        try:
            ends: list[asyncio.Future[Any]] = [reading, beating, self.gone]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._lose_broken()
        finally:
            self._lose("the link was closed")
            # Before any wait: who cancels us may do so in the middle of this, and streams would wait for ever.
            for stream in self._streams.values():
                stream.fail(self.lost_error())
            self._streams.clear()
            reading.cancel()
            beating.cancel()
            failures = await asyncio.gather(reading, beating, return_exceptions=True)
            await asyncio.gather(*self._late, return_exceptions=True)
        for failure in failures:
            if isinstance(failure, Exception):
                log.error("the link to %s failed", self.ref.worker_id, exc_info=failure)
        return self.gone.result()

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.ref.worker_id, self.report, self.outstanding)

    def prompt_load(self) -> WorkerLoad:
        """As one that computes prompts."""
        return WorkerLoad(self.ref.worker_id, self.report, self.prompts)

    @property
    def life(self) -> WorkerLife:
        """Which life of the worker this link leads to."""
        return self.ref.life

    @property
    def fresh(self) -> bool:
        """A load report arrived within the lease."""
        return self.report is not None and time.monotonic() - self._reported_at < self._limits.lease_s

    @property
    def wedged(self) -> bool:
        """The worker's step has been running for longer than a lease: nothing new should wait behind it."""
        return self.report is not None and self.report.step_age_s > self._limits.lease_s

    async def reserve(self, build: Callable[[int], Reserve], patience_s: float) -> Ticket:
        """Ask a decode worker for blocks; `build` makes the question of its call id. The caller releases the ticket.

        Raises OverloadedError when it is full, UnavailableError when it didn't answer within `patience_s`, WorkerLostError.
        """
        asking = asyncio.ensure_future(self._ask_for_ticket(build))
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            self._leave_to_itself(asking)
            raise UnavailableError(f"{self.ref.worker_id} did not answer within {patience_s:g} s") from None
        except asyncio.CancelledError:
            self._leave_to_itself(asking)
            raise

    def open_stream(self, ticket_id: int) -> TokenStream:
        """Where this ticket's tokens will arrive, until `release`."""
        stream = self._streams[ticket_id] = TokenStream()
        if self.gone.done():
            stream.fail(self.lost_error())
        return stream

    def adopt_stream(self, ticket_id: int, stream: TokenStream) -> None:
        """This ticket's tokens go on with what another worker has begun."""
        self._streams[ticket_id] = stream
        if self.gone.done():
            stream.fail(self.lost_error())

    async def migrate(self, ticket_id: int, target: Ticket) -> Migrated:
        """Have a decode worker hand a stream over to another; returns when all its tokens are here and its KV is there.

        Raises the worker's refusal: then it goes on with the stream. WorkerLostError, or UnavailableError if it didn't answer:
        then the stream has failed, for nobody knows where it is.
        """
        deadline_s = _SEND_LEASES * self._limits.lease_s
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._ask(lambda call_id: Migrate(call_id, ticket_id, target), 2 * deadline_s)
        except TimeoutError:
            error = UnavailableError(f"{self.ref.worker_id} did not hand the stream over within {deadline_s:g} s")
            if ticket_id in self._streams:
                self._streams[ticket_id].fail(error)
            raise error from None
        return self._expect(answer, Migrated)

    async def copy(self, ticket_id: int, target: Ticket) -> None:
        """Have a decode worker send a stream's KV to another as well; returns when it is there.

        Raises the worker's refusal, WorkerLostError, or UnavailableError if it didn't answer. None of it touches the stream.
        """
        deadline_s = _SEND_LEASES * self._limits.lease_s
        self._expect(await self._ask(lambda call_id: Copy(call_id, ticket_id, target), deadline_s), Copied)

    async def attach(self, ticket_id: int, first_token: int | None, sampling: SamplingParams, num_generated: int) -> float:
        """Let a ticket's sequence join the batch; waits for the commit, and says how long the worker did, in seconds. Without a
        first token the worker computes the prompt.

        Raises KvTransferError, WorkerLostError.
        """
        answer = await self._ask(
            lambda call_id: Attach(call_id, ticket_id, first_token, sampling, num_generated), 3 * self._limits.lease_s
        )
        waited_s = self._expect(answer, Attached).waited_s
        self._progress_at = time.monotonic()
        if ticket_id in self._streams:
            self._streams[ticket_id].attached = True
        return waited_s

    def release(self, ticket_id: int) -> None:
        """Give a ticket back; idempotent, also when the worker is gone."""
        self._streams.pop(ticket_id, None)
        self._tell(Release(ticket_id))

    async def prefill(
        self,
        request_id: str,
        ticket: Ticket,
        token_ids: tuple[int, ...],
        num_generated: int,
        sampling: SamplingParams,
        cache_salt: str,
        trace: TraceContext,
        *,
        ahead: bool,
    ) -> FirstToken:
        """Compute a prompt at a prefill worker and have its KV pushed to the ticket. Whoever gives up calls `cancel`.

        Raises what the worker answers, OverloadedError for a full queue, KvTransferError and WorkerLostError.
        """
        if not self._num_prefills:
            self._progress_at = time.monotonic()
        self._num_prefills += 1
        try:
            answer = await self._ask(
                lambda call_id: Prefill(
                    call_id, request_id, ticket, token_ids, num_generated, sampling, cache_salt, trace, ahead
                ),
                _LONGEST_PREFILL_S,
            )
            return self._expect(answer, FirstToken)
        finally:
            self._num_prefills -= 1

    @property
    def claims(self) -> dict[int, bool]:
        """Tickets that are held here, and whether the worker owes tokens for them."""
        return {ticket_id: stream.attached and not stream.ended for ticket_id, stream in self._streams.items()}

    async def audit(self, patience_s: float) -> DecodeBooks | PrefillBooks:
        """The worker's books. Raises UnavailableError when it does not answer in time, WorkerLostError, ProtocolError."""
        answer = await self._ask(Audit, patience_s)
        if self.ref.role is Role.DECODE:
            return self._expect(answer, DecodeBooks)
        return self._expect(answer, PrefillBooks)

    def cancel(self, request_id: str) -> None:
        """Stop a prefill; idempotent, also when the worker is gone."""
        self._tell(Cancel(request_id))

    async def _beat(self) -> None:
        """Renew our leases at the worker, and notice when it no longer serves us."""
        limits = self._limits
        while True:
            self._tell(Ping())
            await asyncio.sleep(limits.heartbeat_s)
            now = time.monotonic()
            if now - self._heard_at > limits.lease_s:
                self._lose(f"it was silent for {limits.lease_s:g} s")
            elif self._owes_progress() and now - self._progress_at > _STALL_LEASES * limits.lease_s:
                self._lose(f"it made no step for {_STALL_LEASES * limits.lease_s:g} s")
            elif self.retired and not self.outstanding.in_flight:
                self._lose("the worker left the cluster")

    def _owes_progress(self) -> bool:
        return self._num_prefills > 0 or any(stream.attached and not stream.ended for stream in self._streams.values())

    def _on_message(self, message: Any) -> None:
        now = self._heard_at = time.monotonic()
        if isinstance(message, TokenFrame):
            self._progress_at = now
            arrival = Arrival(now, message.step_s)
            for output in message.outputs:
                stream = self._streams.get(output.ticket_id)
                if stream is not None:
                    stream.put(output, arrival)
        elif isinstance(message, LoadReport):
            self._on_load_report(message, now)
        else:
            log.warning("%s sent an unexpected %s", self.ref.worker_id, type(message).__name__)

    def _on_load_report(self, report: LoadReport, now: float) -> None:
        if WorkerLife(report.worker_id, report.epoch) != self.life:
            self._lose(f"{report.worker_id} of epoch {report.epoch} answers at its address")
            return
        if self.report is None or report.steps != self.report.steps:
            self._progress_at = now
        self.report = report
        self._reported_at = now
        self.outstanding.reported()
        self.prompts.reported()
        self._on_report()

    def _tell(self, message: Any) -> None:
        if self.gone.done():
            return
        try:
            self._caller.send(message)
        except WorkerLostError:
            self._lose_broken()

    async def _ask(self, build: Callable[[int], Any], deadline_s: float) -> Any:
        """As `CallClient.ask`, but when it raises because the connection is lost then so is the link already."""
        try:
            return await self._caller.ask(build, deadline_s)
        except WorkerLostError:
            if not self._caller.lost:
                raise  # the worker says it of another one
            self._lose_broken()
            raise self.lost_error() from None

    def _lose(self, reason: str) -> None:
        if not self.gone.done():
            self.gone.set_result(reason)
            self._on_load()

    def _lose_broken(self) -> None:
        if not self.gone.done():
            self.died = True
            self._lose("the connection broke")

    def lost_error(self) -> WorkerLostError:
        """What befell everything on this link. Only once `gone` is done."""
        return WorkerLostError(f"{self.ref.role.value} worker {self.ref.worker_id} was lost: {self.gone.result()}")

    def _expect(self, answer: Any, kind: type[_Answer]) -> _Answer:
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self.ref.worker_id} answered with {type(answer).__name__} where {kind.__name__} was due")
        return answer

    async def _ask_for_ticket(self, build: Callable[[int], Reserve]) -> Ticket:
        """A worker that doesn't answer within a lease is lost: our heartbeats would keep a ticket that we never heard of."""
        lease_s = self._limits.lease_s
        try:
            async with asyncio.timeout(lease_s):
                answer = await self._ask(build, 2 * lease_s)
        except TimeoutError:
            self._lose(f"it did not answer within {lease_s:g} s")
            raise self.lost_error() from None
        return self._expect(answer, Reserved).ticket

    def _leave_to_itself(self, asking: asyncio.Future[Ticket]) -> None:
        """The request went elsewhere or its client left; should the ticket be granted after all, it is given back."""
        self._late.add(asking)
        asking.add_done_callback(self._give_back_late)

    def _give_back_late(self, asking: asyncio.Future[Ticket]) -> None:
        self._late.discard(asking)
        if not asking.cancelled() and asking.exception() is None:
            self.release(asking.result().ticket_id)
