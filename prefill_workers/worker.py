"""The prefill worker's loop: prompts in, chunks through the engine, KV out to decode, first token to the router.

    Prefill ──► pair open ──► QUEUED ──► COMPUTING: each step pushes its KV layer by layer ──► first token
                                                                            └──► commit ──► blocks free

Cancel: a queued prompt is dropped at once, a computing one after its chunk, a pushing one after its push. In each case the
decode side is told, and the blocks come back when no step and no transfer reads them any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from engine.batch import SampledToken
from engine.engine_thread import EngineThread
from engine.memory.cache_teller import CacheTeller
from engine.memory.prefix_cache import PrefixCache
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.first_rank import FirstRank
from engine.sampler import finish_reason
from engine.scoring import PromptScores
from kv_transfer.offloading import tiers_of
from kv_transfer.peers import DecodePeers
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import send_ranks
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair
from kv_transfer.tiers.resets import Resets
from kv_transfer.transport import ReceiveTransport, SendTransport
from prefill_workers.books import prefill_books
from prefill_workers.checks import check_prefill
from prefill_workers.fetching import Fetching
from prefill_workers.job import Job
from prefill_workers.jobs import Jobs
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler
from protocol.audit import Audit
from protocol.cache.news import CacheAsk
from protocol.cache.reset import CacheReset
from protocol.endpoint import Endpoint, Handler
from protocol.errors import (
    OverloadedError,
    TandemError,
    WorkerLostError,
)
from protocol.messages import Cancel, Failed, FirstToken, LoadReport, Prefill, PrefillLoad
from telemetry.logging import fields

log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker, without Ray. Made on a running event loop; `run` serves until it is cancelled."""

    def __init__(self, rank: FirstRank, receiving: Sequence[ReceiveTransport], sending: Sequence[SendTransport]) -> None:
        """`receiving` and `sending` are the ways that KV can come and leave, the best first."""
        config, runner, gang, pool = rank.config, rank.runner, rank.gang, rank.runner.pool
        self.me = rank.me
        self._limits = config.limits
        self._max_queued = config.prefill.max_queued_requests
        self._facts = runner.facts
        self._gang = gang
        self._engine = EngineThread(runner, gang, PREFILL_NICENESS)
        self._grammars = rank.grammars
        self._endpoint = Endpoint(rank.server, lease_s=self._limits.lease_s, heartbeat_s=self._limits.heartbeat_s)
        self._teller = CacheTeller(rank.me.life, self._endpoint.send)
        self._cache = PrefixCache(pool.num_blocks, pool.num_kept, self._teller.note)
        self._teller.tells_of(self._cache.keys)
        self._scheduler = PrefillScheduler(self._cache, pool.block_size, config.prefill)
        self._progress = StepProgress(pool.data.device)
        lease_s = config.limits.lease_s
        senders = send_ranks(pool.layers(), pool.block_size, sending, gang.askers(), lease_s, self._progress)
        self._peers = DecodePeers(rank.me, rank.secret, runner.layout(), senders, config.limits)
        self._tokens = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._draining = False
        self._tasks = asyncio.TaskGroup()
        self.tiers = tiers_of(
            config,
            pool.data,
            runner.layout(),
            rank.me.arithmetic,
            rank.secret,
            self._cache,
            token_s=lambda: self._engine.busy_s / self._tokens if self._tokens else 0.0,
            on_change=self._changed,
            be_nice=lambda: be_nice(PREFILL_NICENESS),
        )
        self._resets = Resets(self._cache, self.tiers, self._endpoint.send, self._spawn)
        self._jobs = Jobs(
            self._scheduler,
            self._endpoint.send,
            self._spawn,
            self._changed,
            None if self.tiers is None else self.tiers.note,
        )
        self._fetching = Fetching(
            rank,
            self._cache,
            receiving,
            self._peers,
            self._endpoint.send,
            self._spawn,
            self._changed,
            None if self.tiers is None else self.tiers.reader,
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises WorkerLostError when another rank of this worker is lost."""
        handlers: dict[type[Any], Handler] = {
            Prefill: self._prefill,
            Cancel: self._cancel,
            CacheAsk: self._teller.ask,
            Audit: self._audit,
            CacheReset: self._resets.ask,
            **self._fetching.handlers,
        }
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._gang.run())
                tasks.create_task(self._endpoint.run(handlers, self.load, self._peer_lost))
                tasks.create_task(self._teller.run())
                tasks.create_task(self._steps())
                tasks.create_task(self._retire_broken_pairs())
                if self.tiers is not None:
                    tasks.create_task(self.tiers.run())
        finally:
            await self._peers.close()
            await self._fetching.close()
            if self.tiers is not None:
                self.tiers.close()
            await self._gang.close()
            self._engine.close()
            self._grammars.close()

    async def drain(self) -> None:
        """Take no more prompts. Returns when the last one's KV is handed over."""
        self._draining = True
        self._changed()
        await self._idle.wait()

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held by prompts of ours."""
        self._cache.check_integrity(job.prompt.block_table for job in self._jobs)

    def load(self) -> LoadReport:
        """The worker's load at this moment, as routers are told it."""
        return LoadReport(
            worker_id=self.me.worker_id,
            epoch=self.me.epoch,
            running=sum(job.in_step for job in self._jobs),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self._jobs),
            transfers=self._peers.pushes_in_flight,
            steps=self._engine.steps,
            busy_s=self._engine.busy_s,
            step_age_s=self._engine.step_age_s,
            cached_blocks=self._cache.num_cached,
            prefix_cache_queries=self._scheduler.cache_queries,
            prefix_cache_hits=self._scheduler.cache_hits,
            prefix_cache_evictions=self._cache.evictions,
            lent_tokens=self._fetching.lender.lent_tokens,
            brought=self._scheduler.brought,
            failed_fetches=self._fetching.failed,
            tiers=() if self.tiers is None else self.tiers.reports,
            prefill=PrefillLoad(computed_tokens=self._tokens),
        )

    def _audit(self, router: bytes, message: Audit) -> None:
        books = prefill_books(message.call_id, self._cache, self._scheduler, self._peers, self._jobs.rows())
        self._endpoint.send(router, books)

    # -- arrival ---------------------------------------------------------------------------------------

    def _prefill(self, router: bytes, message: Prefill) -> None:
        try:
            if self._draining:
                raise WorkerLostError(f"{self.me.worker_id} is draining")
            if len(self._jobs) >= self._max_queued:
                raise OverloadedError(f"{len(self._jobs)} prompts are waiting already", retry_after_s=1.0)
            check_prefill(message, self._facts, self._scheduler)
        except TandemError as error:
            self._endpoint.send(router, Failed.from_error(message.call_id, error))
            return
        num_top = None if message.num_generated else message.sampling.num_prompt_logprobs
        scores = None if num_top is None else PromptScores(message.token_ids, num_top)
        prompt = self._scheduler.new_prompt(message.token_ids, message.cache_salt, whole=scores is not None)
        job = Job(
            router=router,
            message=message,
            prompt=prompt,
            transfer=OutgoingTransfer(message.ticket),
            arrived=time.monotonic(),
            scores=scores,
        )
        self._jobs.add(job)
        self._spawn(self._admit(job))

    async def _admit(self, job: Job) -> None:
        """Make sure of the way to decode, and of the grammar, before any work is spent."""
        message = job.message
        try:
            if message.sampling.grammar:
                answer = message.token_ids[len(message.token_ids) - message.num_generated :]
                job.constraint = await self._grammars.constraint(message.sampling.grammar, answer)
            if message.sampling.max_tokens - message.num_generated > 1:
                job.pair = await self._peers.pair(message.ticket.worker)
        except TandemError as error:
            self._jobs.fail(job, error)
            return
        await self._fetching.bring(job)
        if not job.stopped:
            self._scheduler.add(job.prompt, ahead=message.ahead)
        self._changed()

    def _peer_lost(self, peer: bytes) -> None:
        self._teller.forget(peer)
        self._fetching.peer_lost(peer)
        self._jobs.stop_router(peer)

    def _cancel(self, router: bytes, message: Cancel) -> None:
        self._jobs.stop_request(router, message.request_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while True:
            self._jobs.fail_broken()
            plan = self._scheduler.plan()
            if not plan:
                self._wake.clear()
                await self._wake.wait()
                continue
            jobs = [self._jobs[chunk.prompt] for chunk in plan]
            self._push(self._progress.begin(), jobs, plan)
            step = self._engine.start(
                [job.chunk(planned) for job, planned in zip(jobs, plan, strict=True)], self._progress.layer_done
            )
            self._endpoint.load_changed()
            outputs = await step
            self._scheduler.step_done(plan)
            for job, chunk, output in zip(jobs, plan, outputs, strict=True):
                job.in_step = False
                self._tokens += chunk.num_tokens
                if job.stopped:
                    self._jobs.leave(job)
                elif output is not None:
                    self._answer(job, output)
            self._progress.finish()

    def _push(self, step: int, jobs: Sequence[Job], plan: Sequence[PlannedChunk]) -> None:
        """Announce this step's KV to every decode worker that gets some of it."""
        parts: dict[SendingPair, list[tuple[Job, PushPart]]] = {}
        now = time.monotonic()
        for job, chunk in zip(jobs, plan, strict=True):
            job.in_step = True
            job.began = job.began or now
            start = max(chunk.handoff_start, job.message.ticket.held_tokens)
            if job.pair is not None and start < chunk.end:
                part = PushPart(job.transfer, chunk.prompt.block_table, start, chunk.end - start)
                parts.setdefault(job.pair, []).append((job, part))
        for pair, items in parts.items():
            done = pair.push(step, [part for _, part in items])
            for job, _ in items:
                job.last_push = done

    def _answer(self, job: Job, output: SampledToken) -> None:
        """The first token goes to the router at once; the rest of the handoff goes on beside the next steps."""
        message, now = job.message, time.monotonic()
        assert job.began is not None, "a computed job has begun"
        try:
            finish = finish_reason(message.sampling, output.token_id, message.num_generated + 1, job.constraint)
        except TandemError as error:
            self._jobs.fail(job, error)
            return
        job.answered = True
        queue_s, prefill_s = job.began - job.arrived, now - job.began
        self._endpoint.send(
            job.router,
            FirstToken(
                call_id=message.call_id,
                token_id=output.token_id,
                logprobs=output.logprobs,
                finish_reason=finish,
                prefilled=job.prefilled(prefill_s),
            ),
        )
        tokens = {"tokens": len(message.token_ids), "cached": job.prompt.cached}
        log.info("prefilled", extra=fields(trace=message.trace.trace_id, **tokens, queue_s=queue_s, prefill_s=prefill_s))
        if finish is not None:
            self._jobs.stop(job)
        else:
            self._spawn(self._hand_over(job))

    async def _hand_over(self, job: Job) -> None:
        """Wait for the last push, commit, and give the blocks back."""
        assert job.pair is not None
        try:
            if job.last_push is not None:
                await job.last_push
            await job.pair.commit(job.transfer)
        except TandemError as error:
            trace = fields(trace=job.message.trace.trace_id)
            log.warning("handoff to %s failed: %s", job.pair.peer.worker_id, error.message, extra=trace)
            self._jobs.stop(job)
        else:
            self._jobs.handed_over(job)

    async def _retire_broken_pairs(self) -> None:
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            self._jobs.fail_broken()
            self._peers.retire_broken()
            self._fetching.retire_lost()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """As long as the worker runs. While it ends, a question may still be read; nothing begins for it."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is shutting down
            work.close()

    def _changed(self) -> None:
        self._endpoint.load_changed()
        self._wake.set()
        if len(self._jobs):
            self._idle.clear()
        else:
            self._idle.set()
