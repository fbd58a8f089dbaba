"""When the loop of a decode worker looks for something to compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from decode_workers.step_loop import StepLoop


class Steps:
    contended = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield


class Scheduler:
    """Nothing of it can be computed, however often it is asked."""

    preemptions = num_preempted = 0

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    def plan(self) -> list[Any]:
        self.asked.release()
        return []


def test_it_looks_again_for_what_comes_free_while_it_sends() -> None:
    """A router is found to have gone when its tokens are sent: its other tickets' blocks are free then."""

    class Outbox:
        sent = 0

        def flush(self, step_s: float) -> None:
            self.sent += 1
            if self.sent == 1:
                loops[0].wake()

    async def main() -> None:
        scheduler, outbox = Scheduler(), Outbox()
        loops.append(StepLoop(Steps(), None, scheduler, outbox, lambda: None))  # type: ignore[arg-type]
        running = asyncio.create_task(loops[0].run())
        async with asyncio.timeout(5.0):
            for _ in range(2):
                await scheduler.asked.acquire()
        for _ in range(5):
            await asyncio.sleep(0)
        assert outbox.sent == 2
        assert scheduler.asked.locked(), "it waits now"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    loops: list[StepLoop] = []
    asyncio.run(main())
