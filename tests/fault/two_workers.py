"""A whole 1P1D system in one process: real workers, real sockets, a small random model, loopback with faults; no Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from configs.facts import KvCacheDtype, ModelFacts
from configs.schema import ClusterConfig, DecodeConfig, LimitsConfig, PrefillConfig
from decode_workers.worker import DecodeWorker
from engine.drafting.draft_model import DraftModel
from engine.grammar import Grammars
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRank
from engine.ranks.gang import Gang
from engine.runner import Runner
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackTransport
from prefill_workers.worker import PrefillWorker
from protocol.audit import Audit
from protocol.calls import CallClient
from protocol.errors import WorkerLostError
from protocol.messages.common import Ping
from protocol.messages.decode import Attach, Attached, Release, Reserve, Reserved, StreamOutput, TokenFrame
from protocol.messages.load import LoadReport
from protocol.messages.prefill import Cancel, FetchFrom, FirstToken, Prefill
from protocol.messages.workers import Role, Ticket, WorkerRef
from protocol.sampling import SamplingParams
from protocol.share import NOBODYS, Share
from protocol.trace import new_trace
from protocol.wire import WireClient, WireServer
from router.rules.leaks import Audited, Leak, find_leaks
from tests.fault.letters import with_letters
from worker.core import WorkerCore
from worker.tiers import opened_tiers

SECRET = b"f" * 32
CONFIG = ClusterConfig(
    dtype="float32",
    disaggregation="always",
    block_size=8,
    prefill=PrefillConfig(kv_cache_tokens=1024, max_batch_tokens=32),
    decode=DecodeConfig(kv_cache_tokens=1024, max_batch_size=8),
    limits=LimitsConfig(lease_s=4.0, heartbeat_s=0.1, connect_s=5.0),
)
"""All share one loop, on a machine that may be busy: a lease is far longer than it is held up there."""


def with_lease(config: ClusterConfig, lease_s: float) -> ClusterConfig:
    """The configuration with another lease: a short one where a test waits until a lease ends."""
    return config.model_copy(update={"limits": config.limits.model_copy(update={"lease_s": lease_s})})


Frames = defaultdict[int, asyncio.Queue[StreamOutput]]


class ScriptedRouter:
    """Speaks a router's messages by hand, so that a test can stop anywhere in between."""

    def __init__(self, prefill: CallClient, decode: CallClient, frames: Frames) -> None:
        self.prefill = prefill
        self.decode = decode
        self.frames = frames

    async def reserve(
        self,
        prompt: list[int],
        max_tokens: int,
        cache_salt: str = "",
        own_tokens: int = 0,
        share: Share = NOBODYS,
        displaces: bool = True,
    ) -> Ticket:
        asking = asyncio.ensure_future(
            self.decode.ask(
                lambda call_id: Reserve(
                    call_id, "r", tuple(prompt), max_tokens, cache_salt, new_trace(), own_tokens, share, displaces
                ),
                10,
            )
        )
        try:
            reserved: Reserved = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back_late)
            raise
        return reserved.ticket

    def _give_back_late(self, asking: asyncio.Future[Reserved]) -> None:
        """As the router does: a ticket that is granted to a request that is gone goes back at once."""
        if not asking.cancelled() and asking.exception() is None:
            self.release(asking.result().ticket)

    async def compute(
        self,
        ticket: Ticket,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str = "r",
        cache_salt: str = "",
        emitted: int = 0,
        fetch: FetchFrom | None = None,
        patience_s: float = 20,
    ) -> FirstToken:
        """`emitted`: how many tokens at the prompt's end are of the answer already."""
        first: FirstToken = await self.prefill.ask(
            lambda call_id: Prefill(
                call_id, request_id, ticket, tuple(prompt), emitted, sampling, cache_salt, new_trace(), False, fetch
            ),
            patience_s,
        )
        return first

    async def attach(self, ticket: Ticket, first: FirstToken, sampling: SamplingParams, emitted: int = 0) -> Attached:
        attached: Attached = await self.decode.ask(
            lambda call_id: Attach(call_id, ticket.ticket_id, first.token_id, sampling, emitted + 1), 10
        )
        return attached

    async def rest(self, ticket: Ticket) -> list[int]:
        """The tokens of this ticket's stream until it ends."""
        tokens: list[int] = []
        while True:
            output = await asyncio.wait_for(self.frames[ticket.ticket_id].get(), 20)
            if output.error is not None:
                raise output.error.to_error()
            tokens += output.token_ids
            if output.finish_reason is not None:
                return tokens

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, request_id: str = "r", cache_salt: str = ""
    ) -> list[int]:
        """A whole request, as the router does it."""
        ticket = await self.reserve(prompt, sampling.max_tokens, cache_salt)
        try:
            first = await self.compute(ticket, prompt, sampling, request_id, cache_salt)
            if first.finish_reason is not None:
                return [first.token_id]
            await self.attach(ticket, first, sampling)
            return [first.token_id, *await self.rest(ticket)]
        finally:
            self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back, if the worker can still be told."""
        if not self.decode.lost:
            self.decode.send(Release(ticket.ticket_id))

    def cancel(self, request_id: str) -> None:
        self.prefill.send(Cancel(request_id))


async def connect_router(
    prefill: WorkerRef, decode: WorkerRef, tasks: dict[str, asyncio.Task[None]], ping: bool = True
) -> ScriptedRouter:
    """A router of these two; what reads its connections is added to `tasks`."""
    frames: Frames = defaultdict(asyncio.Queue)

    def on_message(message: Any) -> None:
        if isinstance(message, TokenFrame):
            for output in message.outputs:
                frames[output.ticket_id].put_nowait(output)
        else:
            assert isinstance(message, LoadReport | Ping)

    callers = []
    for worker in (prefill, decode):
        caller = CallClient(await WireClient.connect(worker.address, SECRET, 5), on_message)
        callers.append(caller)
        number = len(tasks)
        tasks[f"read-{number}"] = asyncio.create_task(caller.run())
        if ping:
            tasks[f"ping-{number}"] = asyncio.create_task(_ping(caller))
    return ScriptedRouter(callers[0], callers[1], frames)


@dataclass
class TwoWorkers:
    """What a test holds in its hands."""

    prefill: PrefillWorker
    decode: DecodeWorker
    network: LoopbackNetwork
    tasks: dict[str, asyncio.Task[None]]
    routers: list[ScriptedRouter] = field(default_factory=list)

    async def router(self, ping: bool = True) -> ScriptedRouter:
        router = await connect_router(self.prefill.me, self.decode.me, self.tasks, ping)
        self.routers.append(router)
        return router

    async def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for what is bound to come. The deadline is that of a test which hangs, on a busy machine too."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.005)

    async def bury(self, role: Role) -> None:
        """This worker has ended, as the test wanted: nothing more is expected of it."""
        self.tasks[role.value] = asyncio.create_task(asyncio.sleep(0))
        await self.tasks[role.value]

    def all_free(self) -> bool:
        """No ticket, no prompt and no transfer is left, and every block is free."""
        loads = [self.decode.core.load(), self.prefill.core.load()]
        return all(x.free_blocks == x.total_blocks and x.tickets == 0 and x.transfers == 0 for x in loads)

    def check(self) -> None:
        """Each worker's own books, at any moment."""
        self.decode.ledger.check_integrity()
        self.prefill.check_integrity()

    async def leaks(self) -> list[Leak]:
        """What an audit finds in the books of the workers that still run."""
        workers: tuple[PrefillWorker | DecodeWorker, ...] = (self.prefill, self.decode)
        return await leaks_of(worker.me for worker in workers if not self.tasks[worker.role.value].done())


async def leaks_of(workers: Iterable[WorkerRef]) -> list[Leak]:
    """What a router that has just come finds in the books of these workers, when nothing is under way."""
    audited = []
    for ref in workers:
        caller = CallClient(await WireClient.connect(ref.address, SECRET, 5), lambda message: None)
        reading = asyncio.create_task(caller.run())
        audited.append(Audited(ref, await caller.ask(Audit, 5)))
        caller.close()
        await reading
    return find_leaks(audited, CONFIG.limits.lease_s, 5)


async def _ping(caller: CallClient) -> None:
    with contextlib.suppress(WorkerLostError):
        while True:
            caller.send(Ping(wants_load=True))
            await asyncio.sleep(0.1)


def first_rank(
    me: WorkerRef,
    config: ClusterConfig,
    server: WireServer,
    runner: Runner,
    gang: Gang | None = None,
    draft: DraftModel | None = None,
) -> FirstRank:
    """With the tests' secret, and grammars over a vocabulary of letters; without a gang it is the only rank."""
    return FirstRank(
        me=me,
        config=config,
        secret=SECRET,
        server=server,
        runner=runner,
        grammars=Grammars(with_letters(runner.facts)),
        gang=gang or Gang.alone(),
        draft=draft,
    )


async def core(rank: FirstRank, transports: Sequence[LoopbackTransport]) -> WorkerCore:
    """Around a first rank, with the tiers that its configuration wants."""
    return WorkerCore(rank, transports, transports, tiers=await opened_tiers(rank))


@asynccontextmanager
async def run_two_workers(
    facts: ModelFacts,
    config: ClusterConfig,
    prefill_block_size: int | None = None,
    decode_kv: KvCacheDtype | None = None,
    seconds: float = 120,
) -> AsyncIterator[TwoWorkers]:
    network = LoopbackNetwork()
    transport = LoopbackTransport(network)

    def runner(num_kv_tokens: int, block_size: int | None = None, kv: KvCacheDtype = config.kv_cache_dtype) -> ModelRunner:
        size = block_size or config.block_size
        return ModelRunner.load(facts, dtype="float32", kv_cache_dtype=kv, block_size=size, num_kv_tokens=num_kv_tokens)

    servers = [WireServer(SECRET, "127.0.0.1") for _ in range(2)]
    refs = [
        WorkerRef(f"{role.value}-0", 1, server.address)
        for role, server in zip((Role.PREFILL, Role.DECODE), servers, strict=True)
    ]
    prefill_runner = runner(config.prefill.kv_cache_tokens, prefill_block_size)
    prefill = PrefillWorker(await core(first_rank(refs[0], config, servers[0], prefill_runner), [transport]))
    decode_runner = runner(config.decode.kv_cache_tokens, kv=decode_kv or config.kv_cache_dtype)
    decode = DecodeWorker(await core(first_rank(refs[1], config, servers[1], decode_runner), [transport]))
    async with served(prefill, decode, network, seconds) as workers:
        yield workers


@asynccontextmanager
async def served(
    prefill: PrefillWorker, decode: DecodeWorker, network: LoopbackNetwork, seconds: float = 120
) -> AsyncIterator[TwoWorkers]:
    """Runs both, audits them at the end, and stops them. Each can do the work of both roles, as all workers can."""
    DecodeWorker(prefill.core)
    PrefillWorker(decode.core)
    tasks = {"prefill": asyncio.create_task(prefill.core.run()), "decode": asyncio.create_task(decode.core.run())}
    workers = TwoWorkers(prefill, decode, network, tasks)
    try:
        async with asyncio.timeout(seconds):
            yield workers
            assert await workers.leaks() == []
    finally:
        for task in tasks.values():
            task.cancel()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
        assert not failures, failures
