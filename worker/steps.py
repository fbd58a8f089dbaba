"""The steps of one worker, whichever role plans them: one at a time, in the order in which their plans were wanted.

    turn ──► plan ──► start: the engine computes, and tells how far it is ──► done ──► the next one's turn

A worker that changes its role computes for both for a while: its streams go on until they have moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from engine.batch import Chunk, SampledToken
from engine.runner import Engine
from kv_transfer.progress import StepProgress


class Steps:
    """Whoever computes takes the `turn`, plans, starts a step and awaits it, and gives the turn back."""

    def __init__(self, engine: Engine, progress: StepProgress) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._engine = engine
        self._progress = progress

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """While inside, nobody else plans or computes."""
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    @property
    def contended(self) -> bool:
        """Whether who wants the turn has to wait for a step of the other role."""
        return self._turn.locked() or self._num_waiting > 0

    def start(
        self, chunks: Sequence[Chunk], announce: Callable[[int], None] | None = None
    ) -> asyncio.Future[list[SampledToken | None]]:
        """Begin a step; the future is its result. Only who has the turn may call it.

        `announce` gets the step's number before it begins, for pushes that send its layers as they are computed.
        """
        assert self._turn.locked(), "whoever computes has the turn"
        number = self._progress.begin()
        if announce is not None:
            announce(number)
        step = self._engine.start(chunks, None if announce is None else self._progress.layer_done)
        step.add_done_callback(lambda done: self._progress.finish())
        return step

    async def renice(self, niceness: int) -> None:
        """Have all further steps computed by a thread that is so much nicer than the process. Returns between two steps."""
        async with self.turn():
            self._engine.renice(niceness)
