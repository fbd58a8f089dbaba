"""The prompts of one prefill worker, and how each of them comes to its end.

    handed over: its KV is committed at the decode worker ──────────────────────────────────► gone
    stopped (cancelled, failed, its router lost) ──► its step is over ──► its last push is over ──► gone

Who frees: this file alone, when a prompt is gone. Until then its blocks may be read by a step or a push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from prefill_workers.job import Job
from prefill_workers.scheduler import PrefillScheduler, Prompt
from protocol.audit import PromptRow
from protocol.errors import KvTransferError, TandemError
from protocol.messages.common import Failed


class Jobs:
    """Every job from its arrival until its blocks are given back.

    `send` takes a peer's wire identity and a message. `spawn` runs a task for as long as the worker. `on_change` is called when
    a job is gone, and `on_released` with the keys and the salt of one that had blocks.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[], None],
        on_released: Callable[[Sequence[bytes], str], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._spawn = spawn
        self._on_change = on_change
        self._on_released = on_released
        self._by_prompt: dict[Prompt, Job] = {}

    def __len__(self) -> int:
        return len(self._by_prompt)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_prompt.values()))

    def __getitem__(self, prompt: Prompt) -> Job:
        return self._by_prompt[prompt]

    def add(self, job: Job) -> None:
        """Add the job of a prompt that has arrived."""
        self._by_prompt[job.prompt] = job

    def fail(self, job: Job, error: TandemError) -> None:
        """Stop a job and tell its router, unless that has its token already."""
        if not job.answered:
            job.answered = True
            self._send(job.router, Failed.from_error(job.message.call_id, error))
        self.stop(job)

    def stop(self, job: Job) -> None:
        """Compute and send nothing more for this job. Idempotent."""
        if job.stopped:
            return
        job.stopped = True
        self._scheduler.drop(job.prompt)
        if job.pair is not None:
            job.pair.abort(job.transfer)
        if not job.in_step:
            self.leave(job)

    def handoff_failed(self, job: Job, error: TandemError) -> None:
        """Stop a job whose router has its first token, and tell that router: the decode worker may be out of reach."""
        if not job.stopped:
            self._send(job.router, Failed.from_error(job.message.call_id, KvTransferError(error.message)))
        self.stop(job)

    def stop_request(self, router: bytes, request_id: str) -> None:
        """A router has cancelled one of its requests."""
        for job in self:
            if job.router == router and job.message.request_id == request_id:
                self.stop(job)

    def stop_router(self, router: bytes) -> None:
        """Stop all jobs of a router whose connection is gone."""
        for job in self:
            if job.router == router:
                self.stop(job)

    def fail_broken(self) -> None:
        """Fail what can't be handed over any more: the way to its decode worker is lost, or its ticket is gone."""
        for job in self:
            if job.pair is not None and not job.answered and not job.stopped:
                if job.pair.broken:
                    self.fail(job, KvTransferError(f"the KV channel to {job.pair.peer.worker_id} is lost"))
                elif job.transfer.refused:
                    self.fail(job, KvTransferError("the decode worker no longer holds the ticket"))

    def leave(self, job: Job) -> None:
        """No step computes a stopped job any more: give its blocks back once its last push has ended."""
        self._spawn(self._gone_after_last_push(job))

    def handed_over(self, job: Job) -> None:
        """The decode worker has all of its KV: give its blocks back, unless it was stopped meanwhile."""
        if not job.stopped:
            job.stopped = True
            self._gone(job)

    def rows(self) -> dict[Prompt, PromptRow]:
        """Every job as an audit sees it."""
        return {prompt: job.row() for prompt, job in self._by_prompt.items()}

    async def _gone_after_last_push(self, job: Job) -> None:
        if job.last_push is not None:
            await asyncio.wait((job.last_push,))
        self._gone(job)

    def _gone(self, job: Job) -> None:
        self._scheduler.drop(job.prompt)
        had_blocks = bool(job.prompt.block_table)
        self._scheduler.release(job.prompt)
        if self._on_released is not None and had_blocks:
            self._on_released(job.prompt.keys, job.message.cache_salt)
        self._by_prompt.pop(job.prompt, None)
        self._on_change()
