"""Neither an hour without a request nor thousands in a row change anything, over the real transports."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, TransportName
from protocol.messages.workers import Role
from tests.cases import THOROUGH
from tests.fault.scenarios import Reference, greedy, prompt_of
from tests.fault.two_workers import ScriptedRouter, connect_router
from tests.fault.worker_process import make_worker

SPEED = 400.0
"""Seconds that pass within one while the system is idle: an hour takes nine."""
PATIENT = ClusterConfig.model_validate(
    {
        "dtype": "float32",
        "block_size": 8,
        "prefill": {"kv_cache_tokens": 1024, "max_batch_tokens": 32},
        "decode": {"kv_cache_tokens": 1024},
        "limits": {"lease_s": 600.0, "heartbeat_s": 4.0, "connect_s": 10.0},
    }
)
"""While time is fast a lease is 1.5 s and a heartbeat 10 ms, so that a busy machine is not taken for a silent peer."""
BOTH = pytest.mark.parametrize("transport", ["shared_memory", "gloo"])


class Clock:
    """A monotonic clock that can run faster, and an event loop's selector that waits by it."""

    def __init__(self) -> None:
        self._real = time.monotonic
        self._since = self._shown = self._real()
        self._speed = 1.0

    def now(self) -> float:
        return self._shown + (self._real() - self._since) * self._speed

    def run_at(self, speed: float) -> None:
        self._shown, self._since, self._speed = self.now(), self._real(), speed

    def selector(self) -> selectors.BaseSelector:
        clock = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                return super().select(None if timeout is None else timeout / clock._speed)

        return Selector()


@asynccontextmanager
async def pair(
    facts: ModelFacts, config: ClusterConfig, transport: TransportName
) -> AsyncIterator[tuple[Mapping[Role, Any], ScriptedRouter]]:
    workers: dict[Role, Any] = {role: make_worker(role, role.value, facts, config, transport) for role in Role}
    tasks = {role.value: asyncio.create_task(worker.core.run()) for role, worker in workers.items()}
    try:
        yield workers, await connect_router(workers[Role.PREFILL].me, workers[Role.DECODE].me, tasks)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def free(workers: Mapping[Role, Any]) -> bool:
    loads = [worker.core.load() for worker in workers.values()]
    return all(load.tickets == 0 and load.transfers == 0 and load.free_blocks == load.total_blocks for load in loads)


@BOTH
@pytest.mark.slow
def test_an_hour_of_idleness_changes_nothing(
    small_model: ModelFacts,
    reference: Reference,
    transport: TransportName,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.now)

    async def scenario() -> None:
        async with pair(small_model, PATIENT, transport) as (workers, router):
            assert await router.generate(prompt_of(50), greedy(6)) == reference(prompt_of(50), 6)
            clock.run_at(SPEED)
            await asyncio.sleep(3600)
            clock.run_at(1.0)
            assert await router.generate(prompt_of(50, 1), greedy(6)) == reference(prompt_of(50, 1), 6)
            async with asyncio.timeout(10):
                while not free(workers):  # noqa: ASYNC110 - what is waited for has no event of its own
                    await asyncio.sleep(0.01)

    make_loop = lambda: asyncio.SelectorEventLoop(clock.selector())  # noqa: E731
    with caplog.at_level("INFO"), asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(scenario())
    opened = [message for message in caplog.messages if "KV to decode goes over" in message]
    assert opened == [f"KV to decode goes over {transport}"], "the pair was never lost"


@BOTH
@pytest.mark.slow
def test_thousands_of_requests_in_a_row_change_nothing(
    small_model: ModelFacts, reference: Reference, transport: TransportName, caplog: pytest.LogCaptureFixture
) -> None:
    number = 2000 if THOROUGH else 200
    config = PATIENT.model_copy(update={"limits": PATIENT.limits.model_copy(update={"lease_s": 10.0, "heartbeat_s": 1.0})})

    async def scenario() -> None:
        async with pair(small_model, config, transport) as (workers, router):
            prompts = [prompt_of(1 + 7 * n, n) for n in range(12)]
            expected = [reference(prompt, 2) for prompt in prompts]
            for n in range(number):
                salt = str(n) if n % 2 else ""  # every other prompt is sent as a whole
                assert await router.generate(prompts[n % 12], greedy(2), cache_salt=salt) == expected[n % 12]
            stats = workers[Role.DECODE].core.arrivals.stats
            assert (stats.committed, stats.failed) == (sum(len(expected[n % 12]) > 1 for n in range(number)), 0)
            async with asyncio.timeout(10):
                while not free(workers):  # noqa: ASYNC110 - what is waited for has no event of its own
                    await asyncio.sleep(0.01)

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    assert sum("KV to decode goes over" in message for message in caplog.messages) == 1
