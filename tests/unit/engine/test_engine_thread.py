"""The thread that computes, as the system sees it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from engine.batch import Chunk
from engine.engine_thread import EngineThread
from engine.model_runner import ModelRunner
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.gang import Gang


class Asking:
    """A runner that says how nice the thread is that it runs in, instead of a token."""

    def execute(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None) -> list[Any]:
        return [os.getpriority(os.PRIO_PROCESS, 0)]


class Alone:
    """A gang of one."""

    def begin(self, chunks: Sequence[Chunk], *, tells_layers: bool, niceness: int) -> list[Any]:
        return []


@pytest.mark.parametrize("niceness", [0, PREFILL_NICENESS])
def test_only_the_computing_thread_is_nice(niceness: int) -> None:
    async def niceness_of_a_step() -> Any:
        engine = EngineThread(cast(ModelRunner, Asking()), cast(Gang, Alone()), niceness)
        try:
            return await engine.start([])
        finally:
            engine.close()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert asyncio.run(niceness_of_a_step()) == [min(19, before + niceness)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_what_a_nice_thread_starts_is_no_nicer() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def nice(then: Callable[[], None]) -> None:
        be_nice(PREFILL_NICENESS)
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        then()

    def run(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    run(lambda: nice(lambda: run(lambda: nice(lambda: None))))
    assert found == [min(19, before + PREFILL_NICENESS)] * 2


def test_work_that_a_step_needs_runs_in_the_same_thread_and_counts_as_busy() -> None:
    """Also where it fails: the next step can begin then."""

    async def scenario() -> None:
        engine = EngineThread(cast(ModelRunner, Asking()), cast(Gang, Alone()))
        threads: list[int] = []

        def work() -> None:
            threads.append(threading.get_ident())
            assert engine.step_age_s > 0
            if len(threads) == 2:
                raise ValueError("as a draft model that can't go on")

        try:
            await engine.run(work)
            busy_s = engine.busy_s
            assert busy_s > 0
            with pytest.raises(ValueError, match="go on"):
                await engine.run(work)
            await engine.start([])
            assert engine.busy_s > busy_s
            assert (engine.steps, engine.step_age_s) == (1, 0.0)
            assert threads[0] == threads[1] != threading.get_ident()
        finally:
            engine.close()

    asyncio.run(scenario())
