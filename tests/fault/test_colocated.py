"""Prompts that are computed where they are decoded: the same tokens, and nothing left behind whatever goes wrong."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from configs.models import resolve
from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError, KvTransferError, OverloadedError
from protocol.messages.decode import Attach, Attached, Prefilled, Release, StreamOutput
from protocol.messages.workers import Role
from protocol.sampling import SamplingParams
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run


def config(decode_tokens: int) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": 8,
            "disaggregation": "auto",
            "prefill": {"kv_cache_tokens": 4096, "max_batch_tokens": 32},
            "decode": {"kv_cache_tokens": decode_tokens, "max_batch_size": 8},
            "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
        }
    )


PERSON = """%llguidance {"no_forcing": true}
start: "{" NAME "}"
NAME: /"name": "[ -!#-[^-~]{1,12}"/
"""
ROOMY, TIGHT = config(4096), config(256)


async def start(router: Any, prompt: list[int], sampling: SamplingParams, emitted: int = 0, salt: str = "") -> int:
    """A ticket whose prompt the decode worker computes."""
    scored = sampling.num_prompt_logprobs is not None and not emitted
    own_tokens = len(prompt) if scored else 1
    ticket = await router.reserve(prompt, sampling.max_tokens - emitted, salt, own_tokens)
    answer = await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, sampling, emitted), 10)
    assert isinstance(answer, Attached)
    ticket_id: int = ticket.ticket_id
    return ticket_id


async def outputs(router: Any, ticket_id: int) -> list[StreamOutput]:
    """All of a stream."""
    found: list[StreamOutput] = []
    while not found or found[-1].finish_reason is None:
        found.append(await asyncio.wait_for(router.frames[ticket_id].get(), 20))
        if (error := found[-1].error) is not None:
            raise error.to_error()
    return found


async def answer_here(
    router: Any, prompt: list[int], sampling: SamplingParams, emitted: int = 0, salt: str = ""
) -> tuple[list[int], Prefilled]:
    """A whole answer, and what was said of the prompt; as behind the router, whoever finds no room asks again."""
    while True:
        try:
            ticket_id = await start(router, prompt, sampling, emitted, salt)
        except OverloadedError:
            await asyncio.sleep(0.02)
            continue
        try:
            found = await outputs(router, ticket_id)
        finally:
            router.decode.send(Release(ticket_id))
        first = found[0].prefilled
        assert first is not None
        assert not any(output.prefilled for output in found[1:]), "it is said once"
        return [token_id for output in found for token_id in output.token_ids], first


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 64, 100])
def test_tokens_are_those_of_a_model_that_runs_alone(two_workers: Factory, reference: Reference, length: int) -> None:
    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            router = await workers.router()
            prompt = prompt_of(length)
            expected = reference(prompt, 12)
            for again in range(2):
                tokens, prefilled = await answer_here(router, prompt, greedy(12))
                assert tokens == expected
                assert prefilled.cached_tokens == (length - 1) // 8 * 8 * again, "the last token is always computed"
            load = workers.decode.core.load()
            assert load.prefilled_tokens == 2 * length - (length - 1) // 8 * 8
            assert load.queued_tokens == load.recomputed_tokens == 0
            assert workers.prefill.core.load().steps == 0
            await workers.until(workers.all_free)

    run(scenario())


SAMPLINGS = [
    SamplingParams(seed=5, max_tokens=24, temperature=0.9, top_p=0.9),
    SamplingParams(seed=6, max_tokens=24, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(seed=7, max_tokens=24, temperature=0.0, num_logprobs=2),
    SamplingParams(seed=8, max_tokens=40, temperature=1.0, grammar=PERSON, stop_token_ids=(0,)),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_and_penalized_answers_are_those_of_the_disaggregated_path(
    two_workers: Factory, sampling: SamplingParams
) -> None:
    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            router = await workers.router()
            prompt = prompt_of(75, 4)
            there = await router.generate(prompt, sampling, cache_salt="there")
            here, _ = await answer_here(router, prompt, sampling, salt="here")
            assert here == there
            resumed, _ = await answer_here(router, [*prompt, *there[:9]], sampling, emitted=9, salt="resumed")
            assert resumed == there[9:]
            await workers.until(workers.all_free)

    run(scenario())


def test_scores_of_a_prompt_are_those_of_prefill_also_among_preempted_streams(two_workers: Factory) -> None:
    scored = SamplingParams(seed=1, max_tokens=3, temperature=0.0, num_prompt_logprobs=4)

    async def scenario() -> None:
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            prompt = prompt_of(90, 2)
            ticket = await router.reserve(prompt, 3)
            there = (await router.compute(ticket, prompt, scored)).prefilled.prompt_logprobs
            router.decode.send(Release(ticket.ticket_id))
            assert there is not None
            tokens, _ = await answer_here(router, prompt, replace(scored, num_prompt_logprobs=None))
            crowd = [asyncio.create_task(answer_here(router, prompt_of(20, n), greedy(90))) for n in range(4)]
            for _ in range(5):
                again, prefilled = await answer_here(router, prompt, scored)
                assert again == tokens
                assert prefilled.cached_tokens == 0, "all of it is computed, whatever is cached"
                here = prefilled.prompt_logprobs
                assert here is not None
                assert array("f", here.chosen) == pytest.approx(array("f", there.chosen), abs=1e-4)
                assert here.top_ids == there.top_ids
            await asyncio.gather(*crowd)
            await workers.until(workers.all_free)

    run(scenario())


async def undisturbed(two_workers: Factory, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """What prefill and decode say, one prompt after the other, with room for all."""
    async with two_workers(ROOMY) as workers:
        router = await workers.router()
        cases = zip(prompts, lengths, strict=True)
        return [await router.generate(prompt, greedy(length)) for prompt, length in cases]


def test_eight_prompts_that_need_three_times_the_pool(two_workers: Factory) -> None:
    """Prompts are preempted half computed, too. Every other one comes from the prefill worker."""
    prompts = [prompt_of(60 + 5 * number, number) for number in range(8)]

    async def scenario() -> None:
        expected = await undisturbed(two_workers, prompts, [70] * 8)
        async with two_workers(TIGHT) as workers:
            router = await workers.router()

            async def one(number: int) -> None:
                prompt = prompts[number]
                if number % 2:
                    tokens, _ = await answer_here(router, prompt, greedy(70))
                else:
                    tokens = await insist(router, prompt, greedy(70), str(number))
                assert tokens == expected[number]

            await asyncio.gather(*(one(number) for number in range(8)))
            load = workers.decode.core.load()
            assert load.num_preemptions > 0
            assert load.recomputed_tokens > 0
            assert load.prefilled_tokens <= sum(60 + 5 * number for number in range(1, 8, 2))
            await workers.until(workers.all_free)

    run(scenario())


async def insist(router: Any, prompt: list[int], sampling: SamplingParams, request_id: str) -> list[int]:
    while True:
        try:
            answer: list[int] = await router.generate(prompt, sampling, request_id)
        except OverloadedError:
            await asyncio.sleep(0.02)
        else:
            return answer


@pytest.mark.slow
def test_the_default_model_says_the_same_here_and_there(two_workers: Factory) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(17, 40_000) for _ in range(50)]

    async def scenario() -> None:
        async with two_workers(ROOMY, resolve("smollm2").facts) as workers:
            router = await workers.router()
            sampling = SamplingParams(seed=3, max_tokens=12, temperature=0.0)
            there = await router.generate(prompt, sampling, cache_salt="there")
            here, _ = await answer_here(router, prompt, sampling, salt="here")
            assert here == there

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_random_cancels_leak_nothing(two_workers: Factory, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randrange(1, 120), number) for number in range(10)]
    counts = [rng.randrange(20, 100) for _ in prompts]

    async def scenario() -> None:
        expected = await undisturbed(two_workers, prompts, counts)
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            survivors = 0

            async def one(number: int) -> None:
                nonlocal survivors
                try:
                    async with asyncio.timeout(rng.choice([None, rng.random()])):
                        tokens, _ = await answer_here(router, prompts[number], greedy(counts[number]))
                except TimeoutError:
                    pass
                else:
                    assert tokens == expected[number]
                    survivors += 1

            await asyncio.gather(*(one(number) for number in range(10)))
            await workers.until(workers.all_free)
            workers.check()
            assert survivors

    run(scenario())


def test_a_lost_router_takes_its_half_computed_prompts_along(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            leaving = await workers.router()
            for number in range(4):
                await start(leaving, prompt_of(800, number), greedy(40))
            assert workers.decode.core.load().queued_tokens > 0
            leaving.prefill.close()
            leaving.decode.close()
            await workers.until(workers.all_free)

    run(scenario())


def test_without_a_prefill_worker_nothing_is_missed(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            router = await workers.router()
            workers.tasks["prefill"].cancel()
            await workers.bury(Role.PREFILL)
            prompt = prompt_of(100)
            tokens, _ = await answer_here(router, prompt, greedy(10))
            assert tokens == reference(prompt, 10)

    run(scenario())


def test_what_can_not_be_computed_here_is_refused(two_workers: Factory) -> None:
    async def attach(router: Any, ticket_id: int, sampling: SamplingParams, emitted: int = 0) -> None:
        await router.decode.ask(lambda call_id: Attach(call_id, ticket_id, None, sampling, emitted), 10)

    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            router = await workers.router()
            prompt = prompt_of(40)
            with pytest.raises(InvalidRequestError, match="own"):
                await router.reserve(prompt, 4, "", 41)
            await answer_here(router, prompt, greedy(4))
            held = await router.reserve(prompt, 4)
            assert held.held_tokens == 40
            with pytest.raises(KvTransferError):  # it was committed as soon as it was reserved, or holds all of the prompt
                await attach(router, held.ticket_id + 1000, greedy(4))
            with pytest.raises(InvalidRequestError, match="own_tokens"):
                await attach(router, held.ticket_id, greedy(4))
            partly = await router.reserve(prompt, 4, "", 1)
            with pytest.raises(InvalidRequestError, match="own_tokens"):
                await attach(router, partly.ticket_id, replace(greedy(4), num_prompt_logprobs=0))
            with pytest.raises(InvalidRequestError, match="doesn't fit"):
                await attach(router, partly.ticket_id, greedy(4), emitted=41)
            with pytest.raises(InvalidRequestError, match="longer than the reservation"):
                await attach(router, partly.ticket_id, greedy(5))
            router.decode.send(Release(held.ticket_id))
            router.decode.send(Release(partly.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
