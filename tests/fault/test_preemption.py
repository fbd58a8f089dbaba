"""More streams than the pool has blocks for: some wait, each says what it would have said alone, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from configs.models import resolve
from configs.schema import ClusterConfig, LimitsConfig
from engine.batch import Chunk
from protocol.errors import OverloadedError, TandemError
from protocol.messages.decode import Release
from protocol.messages.workers import Ticket, WorkerRef
from protocol.sampling import SamplingParams
from protocol.share import Share
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import ScriptedRouter


def config(decode_tokens: int, lease_s: float = 4.0, turn_s: float = 20.0) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": 8,
            "prefill": {"kv_cache_tokens": 4096, "max_batch_tokens": 32},
            "decode": {"kv_cache_tokens": decode_tokens, "max_batch_size": 8},
            "limits": {"lease_s": lease_s, "heartbeat_s": 0.1, "connect_s": 5.0, "turn_s": turn_s},
        }
    )


TIGHT = config(256)


def endless(max_tokens: int, seed: int = 1, temperature: float = 0.0) -> SamplingParams:
    """Nothing but its length ends the answer."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, temperature=temperature, num_logprobs=0)


async def insist(router: Any, prompt: list[int], sampling: SamplingParams, request_id: str) -> list[int]:
    """A whole request; as behind the router, whoever finds no room asks again when there may be some."""
    while True:
        try:
            answer: list[int] = await router.generate(prompt, sampling, request_id)
        except OverloadedError:
            await asyncio.sleep(0.02)
        else:
            return answer


async def together(router: Any, prompts: Iterable[list[int]], params: Iterable[SamplingParams]) -> list[list[int]]:
    cases = enumerate(zip(prompts, params, strict=True))
    return await asyncio.gather(*(insist(router, prompt, sampling, str(n)) for n, (prompt, sampling) in cases))


async def reserved(router: Any, prompt: list[int], sampling: SamplingParams) -> Callable[[], Awaitable[Any]]:
    """A request up to its first token, which holds its blocks but does not grow; what is returned starts its decode."""
    ticket: Ticket = await router.reserve(prompt, sampling.max_tokens)
    first = await router.compute(ticket, prompt, sampling)
    return lambda: router.attach(ticket, first, sampling)


async def started(router: Any, prompt: list[int], sampling: SamplingParams) -> Ticket:
    """A request whose decode has begun."""
    ticket: Ticket = await router.reserve(prompt, sampling.max_tokens)
    await router.attach(ticket, await router.compute(ticket, prompt, sampling), sampling)
    return ticket


def test_eight_streams_that_need_three_times_the_pool(two_workers: Factory) -> None:
    """8 x (12 + 84 tokens) in a pool of 256, greedy and sampled, against the same with room for all."""
    prompts = [prompt_of(12, n) for n in range(8)]
    params = [endless(84, seed=n, temperature=0.0 if n % 2 else 0.9) for n in range(8)]
    params[4:] = [replace(each, repetition_penalty=1.2, presence_penalty=0.5) for each in params[4:]]
    answers: list[list[list[int]]] = []
    loads = []

    async def scenario(settings: ClusterConfig) -> None:
        async with two_workers(settings) as workers:
            router = await workers.router()
            answers.append(await together(router, prompts, params))
            await workers.until(workers.all_free)
            loads.append(workers.decode.core.load())

    run(scenario(TIGHT))
    run(scenario(config(1024)))
    assert answers[0] == answers[1]
    assert all(len(answer) == 84 for answer in answers[0])
    tight, roomy = loads
    assert tight.num_preemptions > 0
    assert tight.recomputed_tokens > 0
    assert (roomy.num_preemptions, roomy.recomputed_tokens) == (0, 0)
    assert tight.tokens == roomy.tokens == 8 * 83, "nothing was sampled twice"


@pytest.mark.slow
def test_the_default_model_says_the_same(two_workers: Factory) -> None:
    """SmolLM2 in float32, 8 x (40 + 32 tokens) in a pool of 192, against the same two by two; recomputing takes two chunks."""
    rng = random.Random(3)
    prompts = [[rng.randrange(17, 40_000) for _ in range(40)] for _ in range(8)]
    params = [endless(32, seed=n) for n in range(8)]

    async def scenario() -> None:
        # A step of this model can take seconds on a busy machine, and nobody dies.
        async with two_workers(config(192, lease_s=20.0), resolve("smollm2").facts) as workers:
            router = await workers.router()
            undisturbed = []
            for n in range(0, 8, 2):
                undisturbed += await together(router, prompts[n : n + 2], params[n : n + 2])
            assert workers.decode.core.load().num_preemptions == 0
            assert await together(router, prompts, params) == undisturbed
            assert workers.decode.core.load().num_preemptions > 0
            await workers.until(workers.all_free)

    run(scenario())


def test_a_request_as_large_as_the_pool_runs_beside_others(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            prompts = [prompt_of(7), prompt_of(9, 1), prompt_of(5, 2)]
            lengths = [250, 30, 252]
            answers = await together(router, prompts, [endless(length) for length in lengths])
            assert [len(answer) for answer in answers] == lengths
            assert workers.decode.core.load().num_preemptions > 0
            await workers.until(workers.all_free)

    run(scenario())


def test_a_preempted_stream_that_waits_too_long_keeps_its_tenants_tickets_waiting_and_can_be_cancelled(
    two_workers: Factory, gate: threading.Event
) -> None:
    """`turn_s` is so short that it would always wait too long. Another tenant's ticket is granted meanwhile."""

    async def scenario() -> None:
        async with two_workers(config(256, turn_s=1e-6)) as workers:
            router = await workers.router()
            first = await started(router, prompt_of(120), endless(130))
            second = await started(router, prompt_of(90, 1), endless(130))
            decode = workers.decode
            await workers.until(lambda: decode.core.load().waiting > 0)
            gate.clear()  # so that it still waits when it is asked
            with pytest.raises(OverloadedError, match="turn"):
                await router.reserve(prompt_of(1), 2)
            other = await router.reserve(prompt_of(1), 2, share=Share(b"other", 1.0))
            router.decode.send(Release(other.ticket_id))
            router.decode.send(Release(second.ticket_id))
            gate.set()
            await workers.until(lambda: decode.core.load().waiting == 0)
            assert len(await router.rest(first)) == 129
            await workers.until(workers.all_free)

    run(scenario())


def test_drain_waits_for_the_preempted(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            tickets = [await started(router, prompt_of(90, n), endless(100)) for n in range(2)]
            await workers.until(lambda: workers.decode.core.load().num_preemptions > 0)
            async with asyncio.timeout(20):
                await workers.decode.core.drain()
            assert [len(await router.rest(ticket)) for ticket in tickets] == [99, 99]
            assert workers.all_free()

    run(scenario())


def test_a_lost_router_takes_its_preempted_streams_along(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(TIGHT) as workers:
            staying, leaving = await workers.router(), await workers.router()
            leavers = [await reserved(leaving, prompt_of(50, n), endless(180)) for n in range(2)]
            ticket = await started(staying, prompt_of(90), endless(140))
            for attach in leavers:
                await attach()
            await workers.until(lambda: workers.decode.core.load().num_preemptions > 0)
            leaving.prefill.close()
            leaving.decode.close()
            assert len(await staying.rest(ticket)) == 139
            await workers.until(workers.all_free)

    run(scenario())


def test_a_prompt_for_others_is_computed_when_the_preempted_stream_is_back(two_workers: Factory) -> None:
    """Its turn comes while the stream waits for blocks, and no heartbeat looks again. The answers are longer than that."""
    limits = LimitsConfig(lease_s=240.0, heartbeat_s=120.0)
    prompt = prompt_of(16, 3)
    seen: list[bool] = []
    go_on = threading.Event()

    async def scenario() -> None:
        async with two_workers(config(512).model_copy(update={"limits": limits})) as workers:
            router, core, scheduler = await workers.router(), workers.decode.core, workers.decode._scheduler
            runner, peers = cast(Any, core.rank.runner), cast(Any, core.peers)
            execute, pair, reached = runner.execute, peers.pair, asyncio.Event()

            def watched(chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> Any:
                assert not scheduler.num_preempted or go_on.wait(60)
                seen.extend(older.ticket_id in scheduler for chunk in chunks if list(chunk.token_ids) == prompt)
                return execute(chunks, on_layer)

            async def reached_late(worker: WorkerRef) -> Any:
                await reached.wait()
                return await pair(worker)

            runner.execute, peers.pair = watched, reached_late
            idle = await router.reserve(prompt_of(64, 4), 1)
            older = await started(router, prompt_of(150, 1), endless(200))
            younger = await started(router, prompt_of(140, 2), endless(120))
            back = ScriptedRouter(router.decode, router.prefill, router.frames)
            asking = asyncio.create_task(back.compute(await back.reserve(prompt, 4), prompt, greedy(4)))
            await workers.until(lambda: scheduler.num_preempted == 1)
            assert core.load().tickets == 4, "the prompt was taken"
            reached.set()
            router.release(idle)
            await workers.until(lambda: (core.load().tickets, core.load().waiting) == (3, 2))
            go_on.set()
            await asking
            for ticket in (older, younger):
                await router.rest(ticket)

    run(scenario())
    assert seen == [True], "it did not wait for the end of an answer"


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_random_cancels_among_preempted_streams_leak_nothing(two_workers: Factory, reference: Reference, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            survivors = 0

            async def one(number: int) -> None:
                nonlocal survivors
                prompt, count = prompt_of(rng.randrange(1, 60), number), rng.randrange(40, 150)
                try:
                    async with asyncio.timeout(rng.choice([None, rng.random()])):
                        answer = await insist(router, prompt, greedy(count), str(number))
                except TimeoutError:
                    router.cancel(str(number))
                except TandemError:
                    pass
                else:
                    assert answer == reference(prompt, count)
                    survivors += 1

            await asyncio.gather(*(one(number) for number in range(10)))
            await workers.until(workers.all_free)
            assert survivors

    run(scenario())
