"""The prefill role's loop: prompts in, chunks through the engine, KV out to decode, first token to the router.

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
from functools import partial
from typing import Any

from engine.batch import SampledToken
from engine.sampler import finish_reason
from engine.scoring import PromptScores
from kv_transfer.progress import STEP_OVER
from kv_transfer.sender import PIECE_TOKENS, OutgoingTransfer, PushPart, SendingPair
from prefill_workers.books import prefill_books
from prefill_workers.checks import check_prefill, num_wanted_logprobs
from prefill_workers.fetching import Fetching
from prefill_workers.job import Job
from prefill_workers.jobs import Jobs
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler, Prompt
from protocol.endpoint import Handler
from protocol.errors import (
    OverloadedError,
    TandemError,
    WorkerLostError,
)
from protocol.messages.common import Failed
from protocol.messages.load import PrefillLoad
from protocol.messages.prefill import Cancel, FirstToken, Prefill
from protocol.messages.workers import Role
from telemetry.logging import fields
from worker.core import WorkerCore
from worker.roles import RoleBooks, RoleLoad

log = logging.getLogger(__name__)


class PrefillWorker:
    """The prefill role of one worker: it computes prompts for other workers."""

    role = Role.PREFILL

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self.me = core.me
        self._max_queued = core.config.prefill.max_queued_requests
        self._send = core.endpoint.send
        self._cache = core.cache
        growth = partial(core.growth_beside, self)
        self._scheduler = PrefillScheduler(core.cache, core.block_size, core.config.prefill, growth, core.window)
        self._tokens, self._seconds = 0, 0.0
        self._wake = asyncio.Event()
        self._draining = False
        on_given_back = None if core.tiers is None else core.tiers.note
        self._jobs = Jobs(self._scheduler, self._send, core.spawn, core.changed, on_given_back)
        self._fetching = Fetching(core, self._computed_s, lambda: self._scheduler.num_waiting, growth)
        core.add(self)

    def handlers(self) -> dict[type[Any], Handler]:
        """Who answers which message of the role's own."""
        return {Prefill: self._prefill, Cancel: self._cancel}

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the loops that run as long as the worker: the one that computes steps."""
        return [self._run()]

    @property
    def token_s(self) -> float:
        """Seconds that computing a token of a prompt took; 0 if that is not known."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def _computed_s(self, num_tokens: int) -> float:
        """Seconds until so many more tokens would be computed; 0 if that is not known."""
        return (self._scheduler.queued_tokens + num_tokens) * self.token_s

    @property
    def held_blocks(self) -> set[int]:
        """KV blocks that prompts hold."""
        return {block for job in self._jobs for block in job.prompt.block_table.owned}

    def growth(self, shared: Sequence[bytes] = ()) -> int | None:
        """Blocks that prompts may still need beyond those they hold: none, but for what others share of sliding windows."""
        return self._scheduler.kept(shared)

    @property
    def idle(self) -> bool:
        """No prompt is here any more."""
        return not len(self._jobs)

    def drain(self) -> None:
        """Refuse prompts from now on. Those that are here are finished."""
        self._draining = True

    def leave(self) -> None:
        """Send the prompts back that no step has begun: their routers find others for them."""
        for job in self._jobs:
            if job.began is None and not job.stopped:
                self._jobs.fail(job, WorkerLostError(f"{self.me.worker_id} is no prefill worker any more"))

    def peer_lost(self, peer: bytes) -> None:
        """Give up the prompts of a router that is gone."""
        self._jobs.stop_router(peer)

    def beat(self) -> None:
        """Give up what needs a pair or a peer that is lost."""
        self._jobs.fail_broken()
        self._fetching.retire_lost()
        if self._cache.lacking and (held := self._endless()):
            for job in self._jobs:
                if job.began is None and not job.stopped and not self._has_room(job.prompt, held):
                    self._jobs.fail(job, self._crowded())

    def changed(self) -> None:
        """Look again whether a prompt can be computed."""
        if not len(self._jobs):
            self._cache.lacking = False
        self._wake.set()

    async def close(self) -> None:
        """End all fetches."""
        await self._fetching.close()

    def check_integrity(self) -> None:
        """Assert that every block is free, cached or held by prompts of ours."""
        self._cache.check_integrity(job.prompt.block_table.owned for job in self._jobs)

    def role_load(self) -> RoleLoad:
        """The role's part of the worker's load at this moment."""
        return RoleLoad(
            running=sum(job.in_step for job in self._jobs),
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.queued_tokens,
            tickets=len(self._jobs),
            prefix_cache_queries=self._scheduler.cache_queries,
            prefix_cache_hits=self._scheduler.cache_hits,
            brought=self._scheduler.brought,
            failed_fetches=self._fetching.failed,
            prefill=PrefillLoad(computed_tokens=self._tokens),
        )

    def role_books(self, asker: bytes) -> RoleBooks:
        """The role's part of the worker's books at this moment."""
        return prefill_books(self._scheduler, self._jobs.rows())

    # -- arrival ---------------------------------------------------------------------------------------

    def _prefill(self, router: bytes, message: Prefill) -> None:
        try:
            if self._draining:
                raise WorkerLostError(f"{self.me.worker_id} is draining")
            if len(self._jobs) >= self._max_queued:
                raise OverloadedError(f"{len(self._jobs)} prompts are waiting already", retry_after_s=1.0)
            check_prefill(message, self.core.facts, self._scheduler)
            num_top = num_wanted_logprobs(message)
            scores = None if num_top is None else PromptScores(message.token_ids, num_top)
            prompt = self._scheduler.new_prompt(message.token_ids, message.cache_salt, whole=scores is not None)
            if not self._has_room(prompt):
                raise self._crowded()
        except TandemError as error:
            self._send(router, Failed.from_error(message.call_id, error))
            return
        job = Job(
            router=router,
            message=message,
            prompt=prompt,
            transfer=OutgoingTransfer(message.ticket),
            arrived=time.monotonic(),
            scores=scores,
        )
        self._jobs.add(job)
        self.core.spawn(self._admit(job))

    def _has_room(self, prompt: Prompt, endless: set[int] | None = None) -> bool:
        """Whether a prompt gets blocks once those before it are gone, beside what `_endless` returns."""
        growth, owned = self.core.growth_beside(self), self._cache.num_blocks - self._cache.num_free
        if growth is None:
            return False
        if self._scheduler.fits(len(prompt.token_ids), growth + owned):
            return True
        return self._scheduler.fits_beside(prompt, self._endless() if endless is None else endless, growth)

    def _endless(self) -> set[int]:
        """Blocks that no prompt can wait for: those of the worker's streams, which may last, since it had another role; and
        those that a read or a write of a tier has kept for longer than it may.
        """
        now = time.monotonic()
        return self.core.held_beside(self).union(*(pin.table for pin in self._cache.pins if pin.deadline < now))

    def _crowded(self) -> OverloadedError:
        return OverloadedError(f"others hold the KV blocks of {self.me.worker_id}", retry_after_s=1.0)

    async def _admit(self, job: Job) -> None:
        """Make sure of the way to decode, and of the grammar, before any work is spent."""
        message = job.message
        try:
            if message.sampling.grammar:
                answer = message.token_ids[len(message.token_ids) - message.num_generated :]
                job.constraint = await self.core.grammars.constraint(message.sampling.grammar, answer)
            if message.sampling.max_tokens - message.num_generated > 1:
                job.pair = await self.core.peers.pair(message.ticket.worker)
        except TandemError as error:
            self._jobs.fail(job, error)
            return
        if job.stopped:  # meanwhile: whoever stopped it had no pair to tell decode
            if job.pair is not None:
                job.pair.abort(job.transfer)
            return
        await self._fetching.bring(job)
        if not job.stopped:
            self._scheduler.add(job.prompt, ahead=message.ahead)
        self.core.changed()

    def _cancel(self, router: bytes, message: Cancel) -> None:
        self._jobs.stop_request(router, message.request_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            plan: Sequence[PlannedChunk] = ()
            if len(self._jobs):
                async with self.core.steps.turn():
                    self._jobs.fail_broken()
                    plan = self._scheduler.plan()
                    if plan:
                        await self._step(plan)
            if not plan:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self, plan: Sequence[PlannedChunk]) -> None:
        jobs = [self._jobs[chunk.prompt] for chunk in plan]
        chunks = [job.chunk(planned) for job, planned in zip(jobs, plan, strict=True)]
        began = time.monotonic()
        step = self.core.steps.start(chunks, lambda number: self._push(number, jobs, plan))
        self.core.endpoint.load_changed()
        outputs = await step
        self._seconds += time.monotonic() - began
        self._scheduler.step_done(plan)
        for job, chunk, output in zip(jobs, plan, outputs, strict=True):
            job.in_step = False
            self._tokens += chunk.num_tokens
            if job.stopped:
                self._jobs.leave(job)
            elif output is not None:
                self._answer(job, output)

    def _push(self, step: int, jobs: Sequence[Job], plan: Sequence[PlannedChunk]) -> None:
        """Announce this step's KV to every decode worker that gets some of it, and before it what was cached."""
        parts: dict[SendingPair, list[tuple[Job, PushPart]]] = {}
        now = time.monotonic()
        for job, chunk in zip(jobs, plan, strict=True):
            job.in_step = True
            job.began = job.began or now
            start = max(chunk.handoff_start, job.message.ticket.sent_from)
            if job.pair is not None and start < chunk.end:
                for at in range(start, chunk.start, PIECE_TOKENS):
                    job.pair.push(STEP_OVER, [job.part(at, min(at + PIECE_TOKENS, chunk.start))])
                parts.setdefault(job.pair, []).append((job, job.part(max(start, chunk.start), chunk.end)))
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
        self._send(
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
            self.core.spawn(self._hand_over(job))

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
            self._jobs.handoff_failed(job, error)
        else:
            self._jobs.handed_over(job)
