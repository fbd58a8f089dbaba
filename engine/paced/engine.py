"""Steps that take the time of a profile instead of computing, on the worker's own loop: no thread has to wake for them.

start ──► the fingerprints are written and read: tokens ──► wait until the step's time is over ──► done
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from configs.paced.profile import PacedProfile
from engine.batch import Chunk, SampledToken
from engine.paced.alarm import Alarm
from engine.runner import Runner
from engine.sampler import SampleRequest

log = logging.getLogger(__name__)

_LATE = 1.1
"""A step that takes so many times what the profile says is late."""
_TELL_S = 60.0


class PacedEngine:
    """Runs one step at a time and keeps account of it. Made on a running event loop."""

    def __init__(self, runner: Runner, profile: PacedProfile) -> None:
        self._runner = runner
        self._profile = profile
        self._alarm = Alarm()
        self._pace = _Pace()
        self._step: asyncio.Task[list[SampledToken | None]] | None = None
        self._step_began: float | None = None
        self.steps = 0
        self.busy_s = 0.0

    def start(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> asyncio.Future[list[SampledToken | None]]:
        """Begin a step; the future is its result. The caller awaits it before the next one.

        No layer is told before the step is over: what pushes send of one is too little to be cut by layers
        (`kv_transfer.plan.layer_groups`).
        """
        assert self._step_began is None, "one step at a time"
        self._step_began = time.monotonic()
        self._step = asyncio.ensure_future(self._run(chunks, self._step_began))
        return self._step

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 when idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def renice(self, niceness: int) -> None:
        """Do nothing: there is no thread that could be nice."""

    def close(self) -> None:
        """End the step that runs, if any."""
        if self._step is not None:
            self._step.cancel()
        self._alarm.close()

    async def _run(self, chunks: Sequence[Chunk], began: float) -> list[SampledToken | None]:
        try:
            if any(map(_is_work, chunks)):
                results = await asyncio.to_thread(self._runner.execute, chunks)
            else:
                results = self._runner.execute(chunks)
            step_s = self._profile.step_s(*_shape(chunks))
            await self._alarm.until(began + step_s)
            self._pace.note(time.monotonic() - began, step_s)
            return results
        finally:
            self.busy_s += time.monotonic() - began
            self.steps += 1
            self._step_began = None


def _is_work(chunk: Chunk) -> bool:
    """Whether rows of logits are made for it, as long as the vocabulary: that would keep the loop from everything else."""
    if chunk.scores is not None or chunk.constraint is not None:
        return True
    if chunk.sampling is None:
        return False
    return chunk.sampling.num_logprobs is not None or SampleRequest(chunk.sampling, chunk.end, chunk.num_generated).adjusts


def _shape(chunks: Sequence[Chunk]) -> tuple[list[tuple[int, int]], list[int]]:
    """The step's parts of prompts, as (start, number of tokens), and the contexts of its streams."""
    prompts = [(chunk.start, len(chunk.token_ids)) for chunk in chunks if len(chunk.token_ids) > 1 or chunk.sampling is None]
    contexts = [chunk.end for chunk in chunks if len(chunk.token_ids) == 1 and chunk.sampling is not None]
    return prompts, contexts


class _Pace:
    """Whether steps can be had in the profile's time. Where this machine is too slow for so many workers, the log says so."""

    def __init__(self) -> None:
        self._steps = self._late = 0
        self._told = time.monotonic()

    def note(self, took_s: float, step_s: float) -> None:
        """Note a step that took `took_s`, where the profile says `step_s`."""
        now = time.monotonic()
        self._steps += 1
        self._late += took_s > step_s * _LATE
        if now - self._told < _TELL_S:
            return
        if self._late:
            log.warning("%d of %d steps took longer here than the profile says", self._late, self._steps)
        self._steps, self._late, self._told = 0, 0, now
