"""The one thread that computes. A worker's asyncio loop plans and talks; this thread runs the model.

torch releases the GIL inside its operators, so messages are answered while a step is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from engine.batch import Chunk, SampledToken
from engine.niceness import NiceThread
from engine.ranks.gang import Gang
from engine.runner import Runner

_Result = TypeVar("_Result")


class EngineThread:
    """Runs one step at a time, on all ranks of the gang, and keeps account of it. `niceness` is added to the process's."""

    def __init__(self, runner: Runner, gang: Gang, niceness: int = 0) -> None:
        self._runner = runner
        self._gang = gang
        self._thread = NiceThread(niceness)
        self._step_began: float | None = None
        self.steps = 0
        self.busy_s = 0.0

    def start(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> asyncio.Future[list[SampledToken | None]]:
        """Begin a step; the future is its result. The caller awaits it before the next one."""
        assert self._step_began is None, "one step at a time"
        self._step_began = time.monotonic()
        others = self._gang.begin(chunks, tells_layers=on_layer is not None, niceness=self._thread.niceness)
        step = self._thread.run(self._run, chunks, on_layer)
        return asyncio.ensure_future(_together(step, others)) if others else step

    def run(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Begin other work that a step needs, on this rank alone; it counts as busy, and its age as the step's.

        The caller awaits it before the step. What `work` raises is the future's.
        """
        assert self._step_began is None, "one step at a time"
        self._step_began = time.monotonic()
        return self._thread.run(self._timed, work)

    @property
    def step_age_s(self) -> float:
        """How long the current step has been running; 0 when idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def renice(self, niceness: int) -> None:
        """Compute in a thread of another niceness from the next step on. Not while a step runs."""
        assert self._step_began is None, "between two steps"
        self._thread.renice(niceness)

    def close(self) -> None:
        self._thread.close()

    def _run(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None) -> list[SampledToken | None]:
        try:
            return self._timed(lambda: self._runner.execute(chunks, on_layer))
        finally:
            self.steps += 1

    def _timed(self, work: Callable[[], _Result]) -> _Result:
        began = time.monotonic()
        try:
            return work()
        finally:
            self.busy_s += time.monotonic() - began
            self._step_began = None


async def _together(
    step: asyncio.Future[list[SampledToken | None]], others: Sequence[Awaitable[object]]
) -> list[SampledToken | None]:
    """What the first rank sampled, when nothing of the step runs any more on any rank."""
    await asyncio.gather(step, *others)
    return step.result()
