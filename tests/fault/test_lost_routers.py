"""Routers that die at any moment cost the streams of others nothing, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from configs.facts import ModelFacts
from protocol.messages.decode import Attach, Attached
from protocol.wire import PeerGone
from tests.cases import seeds
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, ScriptedRouter, TwoWorkers, run_two_workers

LENGTHS = [1, 7, 8, 9, 16, 31, 32, 33, 64, 100, 128]
ROUNDS, AT_ONCE = 12, 4


@pytest.mark.parametrize("here", [False, True])
def test_the_first_that_a_lost_router_is_told_is_that_its_stream_runs(
    small_model: ModelFacts, reference: Reference, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker finds within that call that the router is gone, and gives up what it owned."""

    async def scenario() -> None:
        async with run_two_workers(small_model, CONFIG) as workers:
            other, lost = await workers.router(), await workers.router()
            server: Any = workers.decode.core.endpoint._server
            send, refused = server.send, list[Attached]()

            def send_to_the_living(identity: bytes, message: Any) -> None:
                if isinstance(message, Attached) and not refused:
                    refused.append(message)
                    raise PeerGone("closed")
                send(identity, message)

            going = asyncio.create_task(other.generate(prompt_of(20, 5), greedy(300), "other"))
            await workers.until(lambda: workers.decode.core.load().running == 1)
            monkeypatch.setattr(server, "send", send_to_the_living)
            asking = asyncio.create_task(ask(lost, prompt_of(30), 20, here=here))
            await workers.until(lambda: bool(refused))
            lost.decode.close()
            assert await going == reference(prompt_of(20, 5), 300)
            await ended([asking])
            await workers.until(workers.all_free)
            again = await workers.router()
            assert await again.generate(prompt_of(9), greedy(4), "again") == reference(prompt_of(9), 4)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 4, thorough=20))
def test_random_deaths_of_routers_leave_nothing(small_model: ModelFacts, seed: int) -> None:
    """In small pools, with prompts that are sent and prompts that the decode worker computes."""
    sizes = {"decode": 512, "prefill": 256}
    pools = {name: getattr(CONFIG, name).model_copy(update={"kv_cache_tokens": size}) for name, size in sizes.items()}

    async def scenario() -> None:
        rng = random.Random(seed)
        async with run_two_workers(small_model, CONFIG.model_copy(update=pools)) as workers:
            await asyncio.gather(*(live_and_die(workers, rng) for _ in range(AT_ONCE)))
            assert not any(workers.tasks[role].done() for role in ("prefill", "decode"))
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())


async def live_and_die(workers: TwoWorkers, rng: random.Random) -> None:
    """Some routers, one after the other, that lose a connection or both in the middle of what they ask."""
    for _ in range(ROUNDS):
        router = await workers.router()
        wanted = [(prompt_of(rng.choice(LENGTHS), rng.randrange(6)), rng.choice([1, 2, 8, 9, 40])) for _ in range(3)]
        asked = [asyncio.create_task(ask(router, *each, here=rng.random() < 0.5, name=f"{n}")) for n, each in enumerate(wanted)]
        await asyncio.wait(asked, timeout=rng.choice([0.002, 0.01, 0.03, 0.1, 0.3]))
        closed = rng.choice([(router.decode,), (router.prefill,), (router.decode, router.prefill)])
        for connection in closed:
            connection.close()
        await ended(asked)
        router.decode.close()
        router.prefill.close()


async def ask(router: ScriptedRouter, prompt: list[int], count: int, *, here: bool, name: str = "r") -> list[int]:
    """An answer, of which decode computes the prompt if it is to be `here`."""
    if not here:
        return await router.generate(prompt, greedy(count), name)
    ticket = await router.reserve(prompt, count, own_tokens=1)
    try:
        await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, greedy(count), 0), 10)
        return await router.rest(ticket)
    finally:
        router.release(ticket)


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended: one that has just got what it waited for may take no notice."""
    async with asyncio.timeout(30):
        while not all(each.done() for each in tasks):
            for each in tasks:
                each.cancel()
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
