"""One prefill worker, several decode workers and a router's own pipeline in one process, over loopback with faults; no Ray."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from configs.facts import KvCacheDtype, ModelFacts
from configs.schema import ClusterConfig, DecodeConfig, LimitsConfig, PoolConfig, PrefillConfig
from decode_workers.speculation.model_speculator import ModelSpeculator
from decode_workers.worker import DecodeWorker
from engine.batch import Chunk, SampledToken
from engine.drafting.draft_model import DraftModel
from engine.model_runner import ModelRunner
from engine.paced.runner import PacedRunner
from engine.ranks.tensor_parallel import ALONE, TensorParallel
from engine.runner import Runner
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackTransport
from prefill_workers.worker import PrefillWorker
from protocol.cluster_view import ClusterView, RolloutObservation, RolloutOrder, RouterObservation, WorkerInfo, WorkerState
from protocol.messages.workers import Duty, Role, WorkerRef
from protocol.sampling import SamplingParams, TokenLogprobs
from protocol.wire import WireServer
from router.dispatch.admission import Admission
from router.dispatch.journal import Journal
from router.dispatch.migrator import Migrator
from router.dispatch.revisions.watch import RolloutWatch
from router.dispatch.roster import Roster
from router.request.pipeline import Pipeline
from router.rules.caching.caches import Caches
from router.rules.fair_queue import ANYBODY, SchedulingClass
from router.rules.leaks import Leak
from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes
from tests.fault.two_gangs import load_gang
from tests.fault.two_workers import SECRET, first_rank, leaks_of
from worker.core import WorkerCore
from worker.rank import share_of

CONFIG = ClusterConfig(
    dtype="float32",
    disaggregation="always",
    block_size=8,
    prefill=PrefillConfig(kv_cache_tokens=4096, max_batch_tokens=64),
    decode=DecodeConfig(kv_cache_tokens=4096, max_batch_size=16, copy_every_tokens=0),
    limits=LimitsConfig(lease_s=4.0, heartbeat_s=0.1, connect_s=5.0, queue_s=20.0),
)


COPYING = CONFIG.model_copy(update={"decode": CONFIG.decode.model_copy(update={"copy_every_tokens": 16})})


class ScriptedController:
    """Says of these workers what a test wants."""

    def __init__(self, refs: list[tuple[Role, WorkerRef]]) -> None:
        ready = WorkerState.READY
        self._infos = {ref.worker_id: WorkerInfo(ref.worker_id, role, 1, ready, ref, (), None, 0, None) for role, ref in refs}
        self._version = 1
        self._changed = asyncio.Event()

    def mark(self, worker_id: str, state: WorkerState) -> None:
        self._change(worker_id, state=state)

    def turn(self, worker_id: str, duty: Duty) -> None:
        """Give a worker another role, or both."""
        both = duty is Duty.BOTH
        self._change(worker_id, role=duty.role, both=both, term=self._infos[worker_id].term + 1)

    def duty_of(self, worker_id: str) -> Duty:
        return self._infos[worker_id].duty

    def _change(self, worker_id: str, **values: Any) -> None:
        self._infos[worker_id] = replace(self._infos[worker_id], **values)
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self, known_version: int) -> ClusterView:
        if known_version == self._version:
            await self._changed.wait()
        return ClusterView(self._version, tuple(self._infos.values()))

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        raise AssertionError("nobody scales here")

    async def flip(self, worker_id: str, duty: Duty) -> None:
        raise AssertionError("a test sets the roles itself")

    async def drain(self, worker_id: str, restart: bool) -> None:
        raise AssertionError("nor drains but by `ManyDecodes.drain`")

    async def roll_out(self, order: RolloutOrder) -> int:
        raise NotImplementedError

    async def abort_rollout(self) -> int:
        raise NotImplementedError

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        raise NotImplementedError

    async def observe(self, seen: RouterObservation) -> None:
        raise AssertionError("nothing sizes itself here")

    async def autoscale(self, paused: str | None) -> None:
        raise AssertionError("nothing sizes itself here")

    async def note_open_requests(self, router_id: str, count: int) -> None:
        raise AssertionError("nobody shuts down here")


@dataclass
class Said:
    """What a request has got so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    resumes: int = 0


class ManyDecodes:
    """What a test holds in its hands."""

    def __init__(
        self, prefill: PrefillWorker, decodes: list[DecodeWorker], network: LoopbackNetwork, config: ClusterConfig
    ) -> None:
        self.prefill = prefill
        self.decodes = {worker.me.worker_id: worker for worker in decodes}
        DecodeWorker(prefill.core)  # every worker can do the work of both roles
        for worker in decodes:
            PrefillWorker(worker.core)
        self.network = network
        self.step_s = 0.0
        """What each decode step takes longer, so that an answer lasts as long on any machine."""
        for worker in decodes:
            self._slow_down(worker)
        self.metrics = Metrics("small", ClusterSample)
        workers: list[PrefillWorker | DecodeWorker] = [prefill, *decodes]
        self.tasks = {worker.me.worker_id: asyncio.create_task(worker.core.run()) for worker in workers}
        self.controller = ScriptedController([(worker.role, worker.me) for worker in workers])
        caches = Caches() if config.routing == "cache" else None
        self.roster = Roster(
            self.controller, SECRET, config.limits, self.metrics.workers_lost.inc, caches, config.http.stream_interval
        )
        self.migrator = Migrator(config, self.roster, self.metrics, prefill.core.window)
        watch = RolloutWatch(self.controller, self.roster)
        admission = Admission(config, self.roster, self.metrics, watch, prefill.core.window)
        self._pipeline = Pipeline(admission, self.migrator, config.limits, self.metrics, watch)
        self.roster.start()
        self.migrator.start()

    async def ask(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        said: Said | None = None,
        pace_s: float = 0.0,
        salt: str = "",
        scheduling_class: SchedulingClass = ANYBODY,
    ) -> Said:
        """A whole request; `said` grows meanwhile. With a pace the client is slow."""
        said = said or Said()
        times = RequestTimes(time.monotonic())
        journal = Journal(tuple(prompt), sampling, salt, scheduling_class=scheduling_class)
        async with aclosing(self._pipeline.run(journal, times)) as pieces:
            async for tokens in pieces:
                said.token_ids += tokens.token_ids
                said.logprobs += tokens.logprobs
                said.resumes = times.resumes
                await asyncio.sleep(pace_s)
        return said

    def drain(self, worker_id: str) -> asyncio.Task[None]:
        """As the supervisor does: no new work for it, and the end of this task is the end of its work."""
        self.controller.mark(worker_id, WorkerState.DRAINING)
        return asyncio.create_task(self.decodes[worker_id].core.drain())

    async def flip(self, worker_id: str, duty: Duty | None = None) -> None:
        """As the supervisor does: give a worker this work, or without it that of the other role."""
        duty = duty or (Duty.DECODE if self.controller.duty_of(worker_id) is Duty.PREFILL else Duty.PREFILL)
        self.controller.turn(worker_id, duty)
        (worker,) = (each for each in self.alive() if each.me.worker_id == worker_id)
        await worker.core.take_role(duty)

    async def flip_at_random(self, rng: random.Random, longest_s: float, over: asyncio.Event) -> int:
        """Flip workers, each a while after the last one, as long as somebody does the work of each role. Return how often."""
        count, names = 0, ["prefill-0", *self.decodes]
        while not over.is_set():
            name, duty = rng.choice(names), rng.choice(list(Duty))
            there = [duty, *(self.controller.duty_of(each) for each in names if each != name)]
            if all(any(each.does(role) for each in there) for role in Role):
                await self.flip(name, duty)
                count += 1
            await asyncio.sleep(rng.uniform(0.0, longest_s))
        return count

    async def kill(self, worker_id: str) -> None:
        self.tasks[worker_id].cancel()
        await asyncio.wait((self.tasks[worker_id],))

    async def bury(self, worker_id: str) -> None:
        """This worker has ended, as the test wanted: nothing more is expected of it."""
        self.tasks[worker_id] = asyncio.create_task(asyncio.sleep(0))
        await self.tasks[worker_id]

    def _slow_down(self, worker: DecodeWorker) -> None:
        runner: Any = worker.core.rank.runner
        execute = runner.execute

        def late(chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> list[SampledToken | None]:
            time.sleep(self.step_s)
            results: list[SampledToken | None] = execute(chunks, on_layer)
            return results

        runner.execute = late

    def alive(self) -> list[PrefillWorker | DecodeWorker]:
        workers: list[PrefillWorker | DecodeWorker] = [self.prefill, *self.decodes.values()]
        return [worker for worker in workers if not self.tasks[worker.me.worker_id].done()]

    def running(self, worker_id: str) -> int:
        return self.decodes[worker_id].core.load().running

    def moves(self, reason: str = "drain") -> dict[str, int]:
        """How often each outcome was counted."""
        return self._counts("tandem:migrations_total", "outcome", reason=reason)

    def copies(self) -> dict[str, int]:
        """Likewise."""
        return self._counts("tandem:kv_copies_total", "outcome")

    def transfer_failures(self) -> int:
        """How many KV caches did not arrive whole."""
        [count] = self._counts("tandem:kv_transfer_failures_total", "model_name").values()
        return count

    def inexact(self) -> dict[str, int]:
        """How many streams were counted as inexact, by reason."""
        return self._counts("tandem:inexact_streams_total", "reason")

    def _counts(self, name: str, by: str, **labels: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found[sample.labels[by]] = int(sample.value)
        return found

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for what is bound to come. The deadline is that of a test which hangs, on a busy machine too."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
                await asyncio.sleep(0.002)

    def all_free(self) -> bool:
        loads = [worker.core.load() for worker in self.alive()]
        return not self.draft_blocks() and all(
            x.free_blocks == x.total_blocks and x.tickets == 0 and x.transfers == 0 for x in loads
        )

    def draft_blocks(self) -> int:
        """Blocks that streams hold in the pools of draft models."""
        speculators = [worker._speculator for worker in self.alive() if isinstance(worker, DecodeWorker)]
        books = [each.kv for each in speculators if isinstance(each, ModelSpeculator)]
        return sum(kv.num_blocks - kv.num_free for kv in books)

    async def leaks(self) -> list[Leak]:
        return await leaks_of(worker.me for worker in self.alive())


@asynccontextmanager
async def run_many_decodes(
    facts: ModelFacts,
    num_decodes: int,
    config: ClusterConfig = CONFIG,
    ranks: Sequence[int] = (),
    formats: Sequence[KvCacheDtype] = (),
    draft: ModelFacts | None = None,
) -> AsyncIterator[ManyDecodes]:
    """Ends with every block free and an empty audit of the workers that still live. `ranks`: those of each decode worker;
    `formats`: of each one's KV, if not all have the configuration's. `draft`: of the draft model, where one is configured.
    """
    network = LoopbackNetwork()
    transports = [LoopbackTransport(network)]
    lease_s = config.limits.lease_s

    def runner(num_kv_tokens: int, shares: TensorParallel = ALONE, kv: KvCacheDtype = config.kv_cache_dtype) -> Runner:
        block_size = config.block_size
        if config.engine == "paced":
            return PacedRunner(facts, block_size=block_size, num_kv_tokens=num_kv_tokens)
        return ModelRunner.load(
            facts,
            dtype="float32",
            kv_cache_dtype=kv,
            block_size=block_size,
            num_kv_tokens=num_kv_tokens,
            ranks=shares,
        )

    def load_decode(number: int, shares: TensorParallel) -> Runner:
        return runner(config.decode.kv_cache_tokens, shares, formats[number] if formats else config.kv_cache_dtype)

    def draft_of(pool: PoolConfig) -> DraftModel | None:
        return None if draft is None else DraftModel.load(config, pool, draft, facts.vocab_size, "cpu")

    servers = [WireServer(SECRET, "127.0.0.1") for _ in range(num_decodes + 1)]
    prefill_runner = runner(config.prefill.kv_cache_tokens)
    me = WorkerRef("prefill-0", 1, servers[0].address, arithmetic=prefill_runner.arithmetic)
    rank = first_rank(me, config, servers[0], prefill_runner, draft=draft_of(config.prefill))
    prefill = PrefillWorker(WorkerCore(rank, transports, transports))
    decodes, following = [], []
    for number, server in enumerate(servers[1:]):
        size = ranks[number] if ranks else 1
        others, gang, first, arithmetic = await load_gang(
            size, partial(load_decode, number), lambda share, *_: share_of(share, transports, transports, lease_s), lease_s
        )
        following += others.running
        me = WorkerRef(f"decode-{number}", 1, server.address, size, arithmetic)
        rank = first_rank(me, config, server, first, gang, draft_of(config.decode))
        decodes.append(DecodeWorker(WorkerCore(rank, transports, transports)))
    many = ManyDecodes(prefill, decodes, network, config)
    try:
        async with asyncio.timeout(120):
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == num_decodes)
            yield many
            await many.until(many.all_free)
            assert await many.leaks() == []
    finally:
        await many.migrator.close()
        await many.roster.close()
        for task in (*many.tasks.values(), *following):
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        results = await asyncio.gather(*many.tasks.values(), return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
        assert not failures, failures


def varied(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy or sampled, perhaps penalized, with logprobs: whatever has to travel with a stream."""
    plain = SamplingParams(seed=rng.randrange(2**32), max_tokens=max_tokens, temperature=rng.choice([0.0, 0.8, 1.2]))
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    return replace(
        plain,
        top_k=rng.choice([0, 20]),
        num_logprobs=rng.choice([None, 0, 2]),
        choice=rng.choice([0, 3]),
        min_tokens=rng.choice([0, max_tokens // 2]),
        stop_token_ids=rng.choice([(), (0, 5)]),
        **rng.choice([{}, penalties]),
    )
