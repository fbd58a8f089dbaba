"""Steps of two loops take turns, one at a time, and lanes hear how far each has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from engine.engine_thread import EngineThread
from engine.niceness import PREFILL_NICENESS
from kv_transfer.progress import StepProgress
from worker.steps import Steps


class Engine:
    """Computes until it is told."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future[list[None]]] = []
        self.layers: list[Callable[[int], None] | None] = []
        self.niceness = 0

    def start(self, chunks: Sequence[Any], on_layer: Callable[[int], None] | None) -> asyncio.Future[list[None]]:
        assert all(step.done() for step in self.under_way), "one step at a time"
        self.under_way.append(asyncio.get_running_loop().create_future())
        self.layers.append(on_layer)
        return self.under_way[-1]

    def renice(self, niceness: int) -> None:
        assert all(step.done() for step in self.under_way), "between two steps"
        self.niceness = niceness


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


def test_two_loops_take_turns() -> None:
    async def scenario() -> None:
        engine = Engine()
        steps = Steps(cast(EngineThread, engine), StepProgress(torch.device("cpu")))
        order: list[str] = []
        announced: list[int] = []

        async def loop(name: str, announce: Callable[[int], None] | None) -> None:
            for _ in range(3):
                async with steps.turn():
                    order.append(name)
                    await steps.start([], announce)

        tasks = [asyncio.create_task(loop("streams", None)), asyncio.create_task(loop("prompts", announced.append))]
        renicing = None
        for number in range(6):
            await until(lambda number=number: len(engine.under_way) > number)  # type: ignore[misc]
            if number == 3:
                renicing = asyncio.create_task(steps.renice(PREFILL_NICENESS))
            engine.under_way[-1].set_result([])
        await asyncio.gather(*tasks)
        assert renicing is not None
        await renicing
        assert order == ["streams", "prompts"] * 3
        assert announced == [2, 4, 6], "all steps have numbers, as at the other ranks"
        assert [layer is not None for layer in engine.layers] == [False, True] * 3
        assert engine.niceness == PREFILL_NICENESS

    asyncio.run(scenario())


def test_a_lane_waits_for_its_step_and_no_other() -> None:
    async def scenario() -> None:
        engine = Engine()
        progress = StepProgress(torch.device("cpu"))
        steps = Steps(cast(EngineThread, engine), progress)
        for announce in (None, lambda number: None):
            async with steps.turn():
                step = steps.start([], announce)
                if announce is not None:
                    waiting = asyncio.create_task(asyncio.to_thread(progress.wait_for, 2, 1, 10.0))
                    engine_layer = engine.layers[-1]
                    assert engine_layer is not None
                    engine_layer(0)
                    assert not waiting.done()
                    engine_layer(1)
                    await waiting
                engine.under_way[-1].set_result([])
                await step
        await asyncio.to_thread(progress.wait_for, 2, 99, 10.0)

    asyncio.run(scenario())
