"""A peer that is killed, and one that is stopped, in each phase of a handoff, over the real transports.

The side that stays is free again within its lease, a second peer never notices, and a peer that wakes up harms nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, TransportName
from protocol.errors import TandemError
from protocol.messages.decode import Release
from protocol.messages.workers import Role, WorkerRef
from tests.cases import THOROUGH
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.two_workers import ScriptedRouter, connect_router, leaks_of
from tests.fault.worker_process import WorkerProcess, make_worker, worker_process

LEASE_S = 2.0
SLACK_S = 6.0
"""Heartbeats, scheduling and a busy machine."""
CONFIG = ClusterConfig.model_validate(
    {
        "dtype": "float32",
        "disaggregation": "always",
        "block_size": 8,
        "prefill": {"kv_cache_tokens": 2048, "max_batch_tokens": 8},
        "decode": {"kv_cache_tokens": 2048},
        "limits": {"lease_s": LEASE_S, "heartbeat_s": 0.1, "connect_s": 5.0},
    }
)
PROMPT = prompt_of(500)
OTHERS_PROMPT = prompt_of(60, 9)
BUSY_PROMPTS = [prompt_of(90, n) for n in range(6)]
PHASES = ["idle", "pushing", "handed over"]
EVERY_CASE = pytest.mark.parametrize(
    ("transport", "how", "phase"),
    [
        pytest.param(transport, how, phase, id=f"{transport}, {how.name}, {phase}")
        for transport in ("shared_memory", "gloo")
        for how in (signal.SIGKILL, signal.SIGSTOP)
        for phase in (PHASES if THOROUGH or transport == "shared_memory" else ["pushing"])
    ],
)


class Scene:
    """One worker in this process, `here`, and two peers in processes of their own."""

    def __init__(self, here: Any, victim: WorkerProcess, other: WorkerProcess) -> None:
        self.here = here
        self.victim = victim
        self.other = other
        self.tasks: dict[str, asyncio.Task[None]] = {"here": asyncio.create_task(here.core.run())}

    async def router(self, peer: WorkerProcess) -> ScriptedRouter:
        pair: tuple[WorkerRef, WorkerRef] = (
            (self.here.me, peer.ref) if self.here.role is Role.PREFILL else (peer.ref, self.here.me)
        )
        return await connect_router(pair[0], pair[1], self.tasks)

    def free(self) -> bool:
        load = self.here.core.load()
        return bool(load.tickets == 0 and load.transfers == 0 and load.free_blocks == load.total_blocks)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


@asynccontextmanager
async def scene(here: Role, facts: ModelFacts, transport: TransportName) -> AsyncIterator[Scene]:
    there = Role.DECODE if here is Role.PREFILL else Role.PREFILL
    with (
        worker_process(there, "victim", facts, CONFIG, transport) as victim,
        worker_process(there, "other", facts, CONFIG, transport) as other,
    ):
        scene = Scene(make_worker(here, "here", facts, CONFIG, transport), victim, other)
        try:
            async with asyncio.timeout(60):
                yield scene
        finally:
            for task in scene.tasks.values():
                task.cancel()
            await asyncio.gather(*scene.tasks.values(), return_exceptions=True)


async def reach(scene: Scene, router: ScriptedRouter, phase: str) -> asyncio.Task[None]:
    """Bring a request with the victim to this phase; the task is what the router does meanwhile."""
    await router.generate(prompt_of(20), greedy(2))  # the pair is open
    if phase == "idle":
        return asyncio.create_task(asyncio.sleep(0))
    answer = 2 if phase == "pushing" else 400
    ticket = await router.reserve(PROMPT, answer)

    async def request() -> None:
        try:
            first = await router.compute(ticket, PROMPT, greedy(answer))
            if phase == "handed over":
                return
            await router.attach(ticket, first, greedy(answer))
        except BaseException:
            # A peer that was stopped before it heard of the push keeps the ticket for as long as the router is there.
            router.release(ticket)
            raise

    task = asyncio.create_task(request())
    if phase == "pushing":
        await until(lambda: scene.here.core.load().transfers > 0, 10)
    else:
        await task
    return task


@dataclass
class Answers:
    """What the others should hear. Computed before anything runs: it would keep the loop from renewing leases."""

    others: list[int]
    busy: list[list[int]]


@pytest.fixture(scope="module")
def answers(reference: Reference) -> Answers:
    return Answers(reference(OTHERS_PROMPT, 6), [reference(prompt, 30) for prompt in BUSY_PROMPTS])


def pools_mapped() -> int:
    """Shared pools in this process, its own and those of peers."""
    gc.collect()  # tests before this one had workers in this process, which reference cycles keep
    return Path("/proc/self/maps").read_text().count("memfd:tandem-kv")


async def lose(scene: Scene, transport: TransportName, how: signal.Signals, phase: str, answers: Answers) -> None:
    mapped = pools_mapped()
    victims, others = await scene.router(scene.victim), await scene.router(scene.other)
    assert await others.generate(OTHERS_PROMPT, greedy(6)) == answers.others
    request = await reach(scene, victims, phase)
    assert phase != "pushing" or not request.done()
    scene.victim.signal(how)
    began = time.monotonic()
    freed = asyncio.create_task(until(scene.free, LEASE_S + SLACK_S))
    if phase == "handed over" and scene.here.role is Role.DECODE:
        # Decode has the KV and could go on; the router gives the ticket up. A lost prefill worker is none of its business.
        victims.decode.send(Release(ticket_id=_newest_ticket(scene)))
    await freed
    assert time.monotonic() - began < LEASE_S + SLACK_S
    assert await others.generate(OTHERS_PROMPT, greedy(6), cache_salt=phase) == answers.others
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError, TandemError):
        await request
    if how is signal.SIGSTOP:
        # It wakes up in the middle of what it did, while another request has taken over the blocks.
        busy = [
            asyncio.create_task(others.generate(prompt, greedy(30), str(n), "awake")) for n, prompt in enumerate(BUSY_PROMPTS)
        ]
        scene.victim.signal(signal.SIGCONT)
        assert await asyncio.gather(*busy) == answers.busy
        again = await scene.router(scene.victim)
        assert await again.generate(OTHERS_PROMPT, greedy(6)) == answers.others
    await until(scene.free, LEASE_S + SLACK_S)
    if how is signal.SIGKILL and scene.here.role is Role.DECODE and transport == "shared_memory":
        await until(lambda: pools_mapped() == mapped + 1, LEASE_S + SLACK_S)
    victim = [scene.victim.ref] if how is signal.SIGSTOP else []
    assert await leaks_of([scene.here.me, scene.other.ref, *victim]) == []


def _newest_ticket(scene: Scene) -> int:
    return max((entry.ticket_id for entry in scene.here.ledger), default=0)


@EVERY_CASE
def test_a_lost_prefill_worker_leaves_decode_free(
    small_model: ModelFacts, answers: Answers, transport: TransportName, how: signal.Signals, phase: str
) -> None:
    async def scenario() -> None:
        async with scene(Role.DECODE, small_model, transport) as here:
            await lose(here, transport, how, phase, answers)
            here.here.ledger.check_integrity()

    run(scenario())


@EVERY_CASE
def test_a_lost_decode_worker_leaves_prefill_free(
    small_model: ModelFacts, answers: Answers, transport: TransportName, how: signal.Signals, phase: str
) -> None:
    async def scenario() -> None:
        async with scene(Role.PREFILL, small_model, transport) as here:
            await lose(here, transport, how, phase, answers)
            here.here.check_integrity()

    run(scenario())
