"""A client that leaves frees everything within one step or chunk, whatever its request is waiting for just then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, DecodeConfig, PrefillConfig
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from kv_transfer.transports.loopback import Faults
from protocol.messages.workers import Role
from tests.fault.many_decodes import CONFIG, ManyDecodes, Said, run_many_decodes
from tests.fault.scenarios import greedy, prompt_of, run

CHUNK = 16
SMALL = CONFIG.model_copy(
    update={
        "prefill": PrefillConfig(kv_cache_tokens=4096, max_batch_tokens=CHUNK),
        "decode": DecodeConfig(kv_cache_tokens=1024, max_batch_size=16),
    }
)
LONG = prompt_of(900, 2)
STEPS = 2
"""The one under way, and the one that was planned when the cancel was on its way."""


@pytest.fixture(autouse=True)
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take long beside the way of a message, as those of real models do."""
    execute = ModelRunner.execute

    def slowly(runner: ModelRunner, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> Any:
        time.sleep(0.03)
        return execute(runner, chunks, on_layer)

    monkeypatch.setattr(ModelRunner, "execute", slowly)


class Leaving:
    """A request whose client leaves as soon as something holds."""

    def __init__(self, many: ManyDecodes, prompt: list[int], max_tokens: int) -> None:
        self.many = many
        self.said = Said()
        sampling = replace(greedy(max_tokens), stop_token_ids=())
        self._asking = asyncio.create_task(many.ask(prompt, sampling, self.said))

    async def when(self, condition: Callable[[], bool]) -> None:
        """Leave then; nothing that anybody holds is left, and no worker computes more than the step it was at."""
        await self.many.until(lambda: condition() or self._asking.done())
        assert not self._asking.done(), "the request ended before it could be left"
        before = self.steps()
        self._asking.cancel()
        await asyncio.wait((self._asking,))
        await self.many.until(self.many.all_free, 30)
        for worker_id, steps in self.steps().items():
            assert steps - before[worker_id] <= STEPS, f"{worker_id} went on"

    def steps(self) -> dict[str, int]:
        return {worker.me.worker_id: worker.core.load().steps for worker in self.many.alive()}


def scene(small_model: ModelFacts, act: Callable[[ManyDecodes], Any], decodes: int = 1, config: ClusterConfig = SMALL) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, decodes, config) as many:
            await act(many)
            said = await many.ask(prompt_of(20), greedy(4))
            assert said.token_ids, "the next request is served at once"

    run(scenario())


@pytest.mark.parametrize("num_chunks", [1, 5, 20])
def test_prefilling(small_model: ModelFacts, num_chunks: int) -> None:
    async def act(many: ManyDecodes) -> None:
        await Leaving(many, LONG, 50).when(lambda: many.prefill.core.load().steps >= num_chunks)

    scene(small_model, act)


def test_transferring(small_model: ModelFacts) -> None:
    async def act(many: ManyDecodes) -> None:
        many.network.faults = Faults(delay_s=0.05)
        await Leaving(many, LONG, 50).when(lambda: many.prefill.core.load().transfers > 0)
        many.network.faults = Faults()

    scene(small_model, act)


def test_decoding(small_model: ModelFacts) -> None:
    async def act(many: ManyDecodes) -> None:
        leaving = Leaving(many, prompt_of(40), 900)
        await leaving.when(lambda: len(leaving.said.token_ids) > 5)

    scene(small_model, act)


def test_waiting_for_room_and_reserving(small_model: ModelFacts) -> None:
    """The first request's blocks are all that there are; the second asks for some again and again."""

    async def act(many: ManyDecodes) -> None:
        first = Leaving(many, prompt_of(900, 1), 100)
        await many.until(lambda: len(first.said.token_ids) > 1)
        second = asyncio.create_task(many.ask(LONG, greedy(100)))
        await asyncio.sleep(0.05)
        assert not second.done()
        before = many.decodes["decode-0"].core.load().tickets
        second.cancel()
        await asyncio.wait((second,))
        assert many.decodes["decode-0"].core.load().tickets == before == 1
        await first.when(lambda: True)

    scene(small_model, act)


def test_waiting_for_the_restart_of_the_only_worker(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, SMALL) as many:
            leaving = Leaving(many, prompt_of(40), 900)
            await many.until(lambda: len(leaving.said.token_ids) > 5)
            await many.kill("decode-0")
            await many.until(lambda: not many.roster.ready(Role.DECODE))
            await leaving.when(lambda: True)

    run(scenario())
