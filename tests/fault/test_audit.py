"""The audit on real workers: silent while they work, and naming just what was made to leak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from protocol.cluster_view import ClusterView, RolloutObservation, RolloutOrder, RouterObservation, WorkerInfo, WorkerState
from protocol.errors import TandemError
from protocol.messages.decode import Release
from protocol.messages.workers import Duty, Role
from router.dispatch.of_all import audit
from router.dispatch.roster import Roster
from router.rules.leaks import Leak
from tests.fault.scenarios import Factory, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, SECRET


class FixedController:
    """Knows these two workers and never another."""

    def __init__(self, workers: Any) -> None:
        both = (workers.prefill, workers.decode)
        infos = (WorkerInfo(w.me.worker_id, w.role, w.me.epoch, WorkerState.READY, w.me, (1,), "", 0, None) for w in both)
        self._view = ClusterView(1, tuple(infos))

    async def watch(self, known_version: int) -> ClusterView:
        if known_version == self._view.version:
            await asyncio.Event().wait()
        return self._view

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        raise NotImplementedError

    async def flip(self, worker_id: str, duty: Duty) -> None:
        raise AssertionError("nobody flips here")

    async def drain(self, worker_id: str, restart: bool) -> None:
        raise NotImplementedError

    async def roll_out(self, order: RolloutOrder) -> int:
        raise NotImplementedError

    async def abort_rollout(self) -> int:
        raise NotImplementedError

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        raise NotImplementedError

    async def observe(self, seen: RouterObservation) -> None:
        raise AssertionError("nothing sizes itself here")

    async def autoscale(self, paused: str | None) -> None:
        raise AssertionError("nothing sizes itself here")

    async def note_open_requests(self, router_id: str, count: int) -> None:
        raise AssertionError("nobody shuts down here")


@asynccontextmanager
async def auditing(workers: Any) -> AsyncIterator[Roster]:
    """A router's links to the workers, without the rest of a router."""
    roster = Roster(FixedController(workers), SECRET, CONFIG.limits, lambda: None)
    roster.start()
    try:
        await workers.until(lambda: all(roster.linked(role) for role in Role))
        yield roster
    finally:
        await roster.close()


def test_a_busy_cluster_is_clean_at_every_look(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers, auditing(workers) as roster:
            router = await workers.router()

            async def one(number: int) -> None:
                try:
                    async with asyncio.timeout(None if number % 3 else 0.05):
                        await router.generate(prompt_of(10 + 7 * number, number), greedy(20), str(number))
                except TimeoutError:
                    router.cancel(str(number))
                except TandemError:
                    pass

            found: list[Leak] = []
            for wave in range(3):
                requests = [asyncio.create_task(one(8 * wave + n)) for n in range(8)]
                while not all(request.done() for request in requests):
                    found += await audit(roster, CONFIG.limits.lease_s)
                await asyncio.gather(*requests)
            assert found == []
            await workers.until(workers.all_free)

    run(scenario())


def test_a_client_that_reserves_and_only_pings_is_found(two_workers: Factory) -> None:
    """It knows the secret and keeps its lease, so the worker alone can't tell it from a router."""

    async def scenario() -> None:
        async with two_workers() as workers, auditing(workers) as roster:
            thief = await workers.router()
            ticket = await thief.reserve(prompt_of(40), 10)
            [leak] = await audit(roster, CONFIG.limits.lease_s)
            assert (leak.kind, leak.worker_id, leak.subject) == ("transfer", "decode-0", f"ticket {ticket.ticket_id}")
            assert leak.num_blocks == len(ticket.block_table)
            thief.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)
            assert await audit(roster, CONFIG.limits.lease_s) == []

    run(scenario())


def test_blocks_that_nobody_owns_are_counted(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers, auditing(workers) as roster:
            lost = workers.decode._cache._blocks.allocate(2)
            held = workers.prefill._cache.allocate(3, [])
            messages = [leak.message for leak in await audit(roster, CONFIG.limits.lease_s)]
            assert messages == [
                "prefill-0 (epoch 1): counts 3 references to blocks, but its tickets, prompts and pins hold 0",
                "decode-0 (epoch 1): has 126 free and 0 owned of 128: 2 blocks are lost",
            ]
            workers.decode._cache._blocks.free(lost)
            workers.prefill._cache.release([], held)
            assert await audit(roster, CONFIG.limits.lease_s) == []

    run(scenario())


def test_a_stream_without_a_ticket_is_the_workers_own_finding(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers, auditing(workers) as roster:
            router = await workers.router()
            ticket = await router.reserve(prompt_of(40), 400)
            first = await router.compute(ticket, prompt_of(40), greedy(400))
            await router.attach(ticket, first, greedy(400))
            workers.decode._scheduler.remove(ticket.ticket_id)
            [leak] = await audit(roster, CONFIG.limits.lease_s)
            assert leak.message.endswith(f"contradicts itself: ticket {ticket.ticket_id} is attached, but has no stream")
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
