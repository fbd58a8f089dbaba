"""Workers with a script instead of an engine, for the router's tests. Used through `conftest.Cluster`.

They speak the real protocol over `protocol.endpoint`: the answer to every prompt is `Script.answer`, one token per step. They
keep books, so that a test can see what the router left behind, and have switches for the faults that a test wants.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from configs.arithmetic import ceil_div
from protocol.audit import Audit, Books, Owner, PromptRow, TicketRow
from protocol.cache.reset import CacheErased, CacheReset
from protocol.endpoint import Endpoint
from protocol.errors import KvTransferError, OverloadedError, TandemError
from protocol.messages.common import Failed
from protocol.messages.decode import Attach, Attached, Prefilled, Release, Reserve, Reserved, StreamOutput, TokenFrame
from protocol.messages.load import DecodeLoad, LoadReport, PrefillLoad
from protocol.messages.prefill import Cancel, FirstToken, Prefill
from protocol.messages.workers import Role, Ticket, WorkerRef
from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs, TokenProb
from protocol.ticket import TicketState, reserved_tokens
from protocol.wire import WireServer

BLOCK_SIZE = 16


def finish_of(sampling: SamplingParams, token_id: int, num_generated: int) -> FinishReason | None:
    if token_id in sampling.stop_token_ids and num_generated > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= sampling.max_tokens else None


@dataclass
class Script:
    """What all workers of a cluster say. `answer` repeats without end."""

    answer: tuple[int, ...] = (1, 2, 3)
    step_s: float = 0.0
    prompt_token_s: float = 0.0
    """What prefill takes for each token of a prompt, one prompt after the other."""

    def token(self, position: int) -> int:
        return self.answer[position % len(self.answer)]

    def logprobs(self, sampling: SamplingParams, token_id: int) -> TokenLogprobs | None:
        if sampling.num_logprobs is None:
            return None
        top = tuple(TokenProb(token_id + offset, -0.5 - offset) for offset in range(sampling.num_logprobs))
        return TokenLogprobs(-0.5, top)

    def prompt_logprobs(self, token_ids: Sequence[int], sampling: SamplingParams) -> PromptLogprobs | None:
        """Token i of the prompt has -i, and so has the likeliest; the next likeliest have a tenth less each."""
        num_top = sampling.num_prompt_logprobs
        if num_top is None:
            return None
        positions = range(1, len(token_ids))
        chosen = array("f", (-float(i) for i in positions))
        ids = array("i", (token_ids[i] + offset for i in positions for offset in range(num_top)))
        top = array("f", (-i - offset / 10 for i in positions for offset in range(num_top)))
        return PromptLogprobs(chosen.tobytes(), ids.tobytes(), top.tobytes())


class ScriptedWorker:
    """Common to both roles: a socket, load reports, switches."""

    role: Role

    def __init__(self, worker_id: str, epoch: int, secret: bytes, script: Script, total_blocks: int, arithmetic: str) -> None:
        self.script = script
        self.total_blocks = total_blocks
        self.mute = False
        """Stop reporting, as a stopped process would."""
        self.step_age_s = 0.0
        self.fail_with: TandemError | None = None
        """Answer the next questions with this."""
        self._server = WireServer(secret, "127.0.0.1")
        self.ref = WorkerRef(worker_id, epoch, self._server.address, arithmetic=arithmetic)
        self._tasks: set[asyncio.Task[None]] = set()
        self.reset: list[str | None] = []
        """Whose cached KV was to be erased."""
        every: dict[type[Any], Callable[[bytes, Any], None]] = {CacheReset: self._reset, **self.handlers()}
        handlers = {kind: self._guarded(handler) for kind, handler in every.items()}
        self.endpoint = Endpoint(self._server, lease_s=5.0, heartbeat_s=0.05)
        self._running = asyncio.create_task(self.endpoint.run(handlers, self.report, self.peer_lost))

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        raise NotImplementedError

    def peer_lost(self, peer: bytes) -> None:
        pass

    def forget(self) -> None:
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def die(self) -> None:
        """Close the socket at once and forget everything."""
        await asyncio.sleep(0)  # so that the endpoint runs, and closes its socket, even if it was made just now
        tasks = {self._running, *self._tasks} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.forget()  # last, for until then it may have taken something new

    def load(self) -> dict[str, int]:
        return {}

    def report(self) -> LoadReport:
        values: dict[str, Any] = {"running": 0, "waiting": 0, "queued_tokens": 0, "tickets": 0} | self.load()
        decode = DecodeLoad(
            reservable_blocks=values.pop("reservable_blocks", 0),
            generated_tokens=11,
            prefilled_tokens=0,
            num_preemptions=0,
            recomputed_tokens=0,
            step_s=0.0,
        )
        prefill = PrefillLoad(computed_tokens=11)
        return LoadReport(
            worker_id=self.ref.worker_id,
            epoch=self.ref.epoch,
            free_blocks=values.pop("free_blocks", self.total_blocks),
            total_blocks=self.total_blocks,
            transfers=0,
            steps=7,
            busy_s=0.5,
            step_age_s=self.step_age_s,
            cached_blocks=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            prefill=prefill if self.role is Role.PREFILL else None,
            decode=decode if self.role is Role.DECODE else None,
            **values,
        )

    def send(self, peer: bytes, message: Any) -> None:
        if not self.mute:
            self.endpoint.send(peer, message)

    def _reset(self, router: bytes, message: CacheReset) -> None:
        self.reset.append(message.tenant)
        self.send(router, CacheErased(message.call_id, 3, 5))

    def _guarded(self, handler: Callable[[bytes, Any], None]) -> Callable[[bytes, Any], None]:
        def handle(peer: bytes, message: Any) -> None:
            call_id = getattr(message, "call_id", None)
            if self.fail_with is not None and call_id is not None:
                self.send(peer, Failed.from_error(call_id, self.fail_with))
            else:
                handler(peer, message)

        return handle


class ScriptedPrefill(ScriptedWorker):
    role = Role.PREFILL

    def __init__(self, *args: Any) -> None:
        self.seen: list[Prefill] = []
        self.cancelled: list[str] = []
        self.working: dict[str, Prefill] = {}
        self.gate = asyncio.Event()
        """Prompts are answered while it is set."""
        self.gate.set()
        self._engine = asyncio.Lock()
        self.handoff_s: float | None = None
        """After so long it says that a handoff has failed whose first token it has sent."""
        self.cached_tokens = 0
        """What is said to have been cached of each prompt."""
        super().__init__(*args)

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        return {Prefill: self._prefill, Cancel: self._cancel, Audit: self._audit}

    def load(self) -> dict[str, int]:
        return {"queued_tokens": sum(len(message.token_ids) for message in self.working.values())}

    def forget(self) -> None:
        self.working.clear()

    def _prefill(self, router: bytes, message: Prefill) -> None:
        self.seen.append(message)
        self.working[message.request_id] = message
        self.spawn(self._answer(router, message))

    async def _answer(self, router: bytes, message: Prefill) -> None:
        await self.gate.wait()
        async with self._engine:
            await asyncio.sleep(self.script.prompt_token_s * len(message.token_ids))
        if self.working.pop(message.request_id, None) is None:
            return
        token_id = self.script.token(message.num_generated)
        finish = finish_of(message.sampling, token_id, message.num_generated + 1)
        logprobs = self.script.logprobs(message.sampling, token_id)
        prompt_logprobs = None if message.num_generated else self.script.prompt_logprobs(message.token_ids, message.sampling)
        prefilled = Prefilled(0.002, self.cached_tokens, prompt_logprobs)
        self.send(router, FirstToken(message.call_id, token_id, logprobs, finish, prefilled))
        if self.handoff_s is not None:
            await asyncio.sleep(self.handoff_s)
            self.send(router, Failed.from_error(message.call_id, KvTransferError("no answer to PushAnnounce")))

    def _audit(self, router: bytes, message: Audit) -> None:
        tickets = [prefill.ticket for prefill in self.working.values()]
        prompts = tuple(
            PromptRow(ticket.ticket_id, ticket.transfer_id, ticket.worker.worker_id, ticket.worker.epoch, 0, False, False)
            for ticket in tickets
        )
        self.send(router, Books(message.call_id, self.total_blocks, self.total_blocks, 0, 0, prompts=prompts))

    def _cancel(self, router: bytes, message: Cancel) -> None:
        self.cancelled.append(message.request_id)
        self.working.pop(message.request_id, None)


class ScriptedDecode(ScriptedWorker):
    role = Role.DECODE

    def __init__(self, *args: Any) -> None:
        self.tickets: dict[int, int] = {}
        """Blocks by ticket."""
        self.prompts: dict[int, Reserve] = {}
        """By ticket."""
        self.computing: set[int] = set()
        """Tickets whose prompts it computes just now."""
        self.held_tokens = 0
        """What is said to be held of each prompt."""
        self.reserved: list[Reserve] = []
        self.attached: list[Attach] = []
        self.refuse_attach = 0
        """This many attaches are answered with a KV transfer error."""
        self.kv_gate = asyncio.Event()
        """KV of prompts that are computed elsewhere arrives while it is set."""
        self.kv_gate.set()
        self.die_after: int | None = None
        """Sudden death after this many tokens of a stream."""
        self.error_after: int | None = None
        self.reserve_gate = asyncio.Event()
        self.reserve_gate.set()
        self._ids = itertools.count(1)
        super().__init__(*args)

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        return {Reserve: self._reserve, Attach: self._attach, Release: self._release, Audit: self._audit}

    def forget(self) -> None:
        self.tickets.clear()

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - sum(self.tickets.values())

    def load(self) -> dict[str, int]:
        queued = sum(len(self.prompts[ticket_id].prompt_token_ids) for ticket_id in self.computing)
        blocks = {"free_blocks": self.free_blocks, "reservable_blocks": self.free_blocks}
        return {"tickets": len(self.tickets), "queued_tokens": queued} | blocks

    def _reserve(self, router: bytes, message: Reserve) -> None:
        self.reserved.append(message)
        self.spawn(self._answer_reserve(router, message))

    async def _answer_reserve(self, router: bytes, message: Reserve) -> None:
        await self.reserve_gate.wait()
        need = ceil_div(reserved_tokens(len(message.prompt_token_ids), message.max_tokens, BLOCK_SIZE), BLOCK_SIZE)
        if need > self.free_blocks:
            self.send(router, Failed.from_error(message.call_id, OverloadedError("full")))
            return
        ticket_id = next(self._ids)
        self.tickets[ticket_id] = need
        self.prompts[ticket_id] = message
        num_tokens = len(message.prompt_token_ids)
        held = min(self.held_tokens, (num_tokens - message.own_tokens) // BLOCK_SIZE * BLOCK_SIZE)
        ticket = Ticket(ticket_id, ticket_id + 1000, self.ref, BLOCK_SIZE, tuple(range(need)), num_tokens, held)
        self.send(router, Reserved(message.call_id, ticket))

    def _attach(self, router: bytes, message: Attach) -> None:
        if self.refuse_attach:
            self.refuse_attach -= 1
            self.send(router, Failed.from_error(message.call_id, KvTransferError("bytes were lost")))
            return
        self.spawn(self._decode(router, message))

    async def _prefill_here(self, message: Attach) -> Prefilled:
        token_ids = self.prompts[message.ticket_id].prompt_token_ids
        self.computing.add(message.ticket_id)
        await asyncio.sleep(self.script.prompt_token_s * len(token_ids))
        self.computing.remove(message.ticket_id)
        scores = None if message.num_generated else self.script.prompt_logprobs(token_ids, message.sampling)
        return Prefilled(0.002, self.held_tokens, scores)

    async def _decode(self, router: bytes, message: Attach) -> None:
        if message.first_token is not None:
            await self.kv_gate.wait()
        if message.ticket_id not in self.tickets:
            return
        self.attached.append(message)
        self.send(router, Attached(message.call_id, 0.0))
        prefilled = await self._prefill_here(message) if message.first_token is None else None
        for position in itertools.count(message.num_generated):
            await asyncio.sleep(self.script.step_s)
            done = position - message.num_generated
            if self.die_after is not None and done >= self.die_after:
                self.spawn(self.die())
                return
            if message.ticket_id not in self.tickets:
                return
            if self.error_after is not None and done >= self.error_after:
                error = Failed.from_error(0, KvTransferError("the ticket is aborted"))
                self.send(router, TokenFrame((StreamOutput(message.ticket_id, (), (), None, error),), 0.0))
                return
            token_id = self.script.token(position)
            finish = finish_of(message.sampling, token_id, position + 1)
            logprobs = self.script.logprobs(message.sampling, token_id)
            scored = () if logprobs is None else (logprobs,)
            output = StreamOutput(message.ticket_id, (token_id,), scored, finish, None, None if done else prefilled)
            self.send(router, TokenFrame((output,), self.script.step_s))
            if finish is not None:
                self.tickets.pop(message.ticket_id, None)
                return

    def _release(self, router: bytes, message: Release) -> None:
        self.tickets.pop(message.ticket_id, None)

    def _audit(self, router: bytes, message: Audit) -> None:
        attached = {attach.ticket_id for attach in self.attached}
        rows = tuple(
            TicketRow(
                ticket_id,
                ticket_id + 1000,
                Owner.ASKER,
                TicketState.ATTACHED if ticket_id in attached else TicketState.RESERVED,
                num_blocks,
                pushes_in_flight=0,
                in_step=False,
                computes_here=ticket_id in self.computing,
                overdue_s=-1.0,
            )
            for ticket_id, num_blocks in self.tickets.items()
        )
        owned = sum(self.tickets.values())
        self.send(router, Books(message.call_id, self.total_blocks, self.free_blocks, owned, owned, tickets=rows))
