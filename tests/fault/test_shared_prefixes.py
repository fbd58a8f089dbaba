"""Prompts that begin alike: what was computed once is handed over again, and is right whatever became of who computed it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from configs.schema import ClusterConfig
from kv_transfer.sender import PushPart, SendingPair
from kv_transfer.transports.loopback import Faults
from prefill_workers import worker as prefill_worker
from protocol.cache.reset import CacheReset
from protocol.errors import TandemError
from protocol.messages.decode import Release
from protocol.messages.prefill import FirstToken
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, with_lease

BLOCK_SIZE = 8
TIGHT = ClusterConfig.model_validate(
    {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "prefill": {"kv_cache_tokens": 192, "max_batch_tokens": 32},
        "decode": {"kv_cache_tokens": 2048},
        "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
    }
)


async def first_and_rest(router: Any, prompt: list[int], max_tokens: int, salt: str = "") -> tuple[FirstToken, list[int]]:
    """A whole greedy request with logprobs for the first token: that token's message, and all tokens."""
    sampling = dataclasses.replace(greedy(max_tokens), num_logprobs=3)
    ticket = await router.reserve(prompt, max_tokens, salt)
    try:
        first = await router.compute(ticket, prompt, sampling, cache_salt=salt)
        if first.finish_reason is not None:
            return first, [first.token_id]
        await router.attach(ticket, first, sampling)
        return first, [first.token_id, *await router.rest(ticket)]
    finally:
        router.decode.send(Release(ticket.ticket_id))


@pytest.mark.parametrize("length", [1, 8, 9, 16, 33, 64, 65, 100])
def test_a_repeated_prompt_says_the_same(two_workers: Factory, reference: Reference, length: int) -> None:
    """Around block and chunk borders; its last token is computed again, so that there are logits."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(length)
            first, tokens = await first_and_rest(router, prompt, 8)
            again, tokens_again = await first_and_rest(router, prompt, 8)
            assert tokens_again == tokens == reference(prompt, 8)
            assert first.prefilled.cached_tokens == 0
            assert again.prefilled.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert first.logprobs is not None
            assert again.logprobs is not None
            assert again.logprobs.chosen == pytest.approx(first.logprobs.chosen, abs=1e-3)
            for one, other in zip(first.logprobs.top, again.logprobs.top, strict=True):
                assert other.token_id == one.token_id
                assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
            load = workers.prefill.core.load()
            assert (load.prefix_cache_queries, load.prefix_cache_hits) == (2 * length, again.prefilled.cached_tokens)
            assert load.tokens == 2 * length - again.prefilled.cached_tokens, "what is cached is not computed"
            await workers.until(workers.all_free)

    run(scenario())


def test_a_shared_beginning_serves_many_at_once(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            beginning = prompt_of(40)
            await first_and_rest(router, beginning, 1)  # one token long: computed, cached, never handed over
            prompts = [beginning + prompt_of(1 + 7 * n, n) for n in range(6)]
            answers = await asyncio.gather(*(first_and_rest(router, prompt, 8) for prompt in prompts))
            assert [tokens for _, tokens in answers] == [reference(prompt, 8) for prompt in prompts]
            assert all(first.prefilled.cached_tokens >= 40 for first, _ in answers)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("length", [64, 67, 100])
def test_what_decode_holds_is_not_sent(two_workers: Factory, reference: Reference, length: int) -> None:
    """A prompt of whole blocks is handed over without a byte the second time; of others, only the last block is sent."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(length)
            await first_and_rest(router, prompt, 8)
            sent = workers.network.bytes_sent
            token_bytes = sent // length
            _, tokens = await first_and_rest(router, prompt, 8)
            assert tokens == reference(prompt, 8)
            assert workers.network.bytes_sent - sent == length % BLOCK_SIZE * token_bytes
            assert workers.decode.core.arrivals.stats.committed == 2
            assert workers.decode.core.load().prefix_cache_hits == length // BLOCK_SIZE * BLOCK_SIZE
            await workers.until(workers.all_free)

    run(scenario())


def test_what_prefill_has_cached_leaves_in_pieces(
    two_workers: Factory, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of both sides grow with the largest push, and each of its messages has one deadline."""
    pushed: list[tuple[int, int]] = []
    push = SendingPair.push

    def noted(pair: SendingPair, step: int, parts: Sequence[PushPart]) -> Any:
        pushed.extend((part.start, part.start + part.num_tokens) for part in parts)
        return push(pair, step, parts)

    monkeypatch.setattr(SendingPair, "push", noted)
    monkeypatch.setattr(prefill_worker, "PIECE_TOKENS", 32)

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(150)
            await first_and_rest(router, prompt[:24], 8)
            first, tokens = await first_and_rest(router, prompt, 8)
            assert (first.prefilled.cached_tokens, tokens) == (24, reference(prompt, 8))
            await router.decode.ask(lambda call_id: CacheReset(call_id, None), 5)
            for held, borders in ((0, [0, 32, 64, 96, 128, 144, 150]), (144, [144, 150])):
                pushed.clear()
                again, tokens = await first_and_rest(router, prompt, 8)
                assert (again.prefilled.cached_tokens, tokens) == (144, reference(prompt, 8)), f"decode holds {held}"
                assert pushed == list(itertools.pairwise(borders))
            await workers.until(workers.all_free)

    run(scenario())


def test_the_next_turn_finds_the_answer_at_decode(two_workers: Factory, reference: Reference) -> None:
    """Prefill has to compute the answer's KV, which decode has: it is not sent, and the tokens are those of a fresh system."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(40)
            _, answer = await first_and_rest(router, prompt, 17)
            turn = prompt + answer + prompt_of(9, 1)
            sent = workers.network.bytes_sent
            first, tokens = await first_and_rest(router, turn, 12)
            assert tokens == reference(turn, 12)
            assert first.prefilled.cached_tokens == 40
            assert workers.decode.core.load().prefix_cache_hits == 56, "40 tokens, and 16 of the answer's 17"
            assert workers.network.bytes_sent - sent == sent // 40 * (len(turn) - 56)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("prefill_block_size", [4, 16])
def test_workers_with_blocks_of_other_sizes(two_workers: Factory, reference: Reference, prefill_block_size: int) -> None:
    async def scenario() -> None:
        async with two_workers(prefill_block_size=prefill_block_size) as workers:
            router = await workers.router()
            for prompt in (prompt_of(100), prompt_of(100), prompt_of(107), prompt_of(45, 1)):
                _, tokens = await first_and_rest(router, prompt, 8)
                assert tokens == reference(prompt, 8)
            assert (workers.decode.core.arrivals.stats.committed, workers.decode.core.arrivals.stats.failed) == (4, 0)
            await workers.until(workers.all_free)

    run(scenario())


def test_two_alike_in_flight_at_once(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            routers = [await workers.router() for _ in range(2)]
            prompt = prompt_of(90)
            answers = await asyncio.gather(*(router.generate(prompt, greedy(6)) for router in routers))
            assert answers == [reference(prompt, 6)] * 2
            await workers.until(workers.all_free)

    run(scenario())


def test_salts_share_nothing(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(33)
            hits, held = [], []
            for salt in ("", "a", "b", "a", ""):
                before = workers.decode.core.load().prefix_cache_hits
                hits.append((await first_and_rest(router, prompt, 2, salt))[0].prefilled.cached_tokens)
                held.append(workers.decode.core.load().prefix_cache_hits - before)
            assert hits == held == [0, 0, 0, 32, 32]

    run(scenario())


def test_hits_are_right_after_eviction(two_workers: Factory, reference: Reference) -> None:
    """A pool of 24 blocks: what does not fit is forgotten, from its end, and computed again when it is asked for."""

    async def scenario() -> None:
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            kept, filler = prompt_of(100), prompt_of(112, 1)
            hits = []
            for prompt in (kept, filler, kept, kept, filler, filler):
                first, tokens = await first_and_rest(router, prompt, 6)
                assert tokens == reference(prompt, 6)
                hits.append(first.prefilled.cached_tokens)
                await workers.until(workers.all_free)
                assert await workers.leaks() == []
            assert hits[3] == 96, "all of it, right after it was used"
            assert hits[5] == 104
            assert 0 < hits[2] < 96, "its end made room, its beginning was still there"

    run(scenario())


def test_what_a_cancelled_prompt_computed_is_used(two_workers: Factory, reference: Reference) -> None:
    """Cancelled in the middle of its prefill and of its transfer, which is slow."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            workers.network.faults = Faults(delay_s=0.02)
            prompt = prompt_of(400)
            ticket = await router.reserve(prompt, 4)
            computing = asyncio.create_task(router.compute(ticket, prompt, greedy(4), "donor"))
            await workers.until(lambda: workers.prefill.core.load().tokens >= 64)
            router.cancel("donor")
            router.decode.send(Release(ticket.ticket_id))
            first, tokens = await first_and_rest(router, prompt, 4)
            assert 64 <= first.prefilled.cached_tokens < 400
            assert first.prefilled.cached_tokens % BLOCK_SIZE == 0
            assert tokens == reference(prompt, 4)
            computing.cancel()
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("faults", [Faults(flip_bit_at=1), Faults(die_at=2), Faults(lose_at=0)], ids=["flip", "die", "lose"])
def test_a_failed_handoff_leaves_a_good_cache(two_workers: Factory, reference: Reference, faults: Faults) -> None:
    """What went wrong on the way is not in the pool it came from; nor is a hit pushed from a damaged place."""

    async def scenario() -> None:
        async with two_workers(CONFIG if faults.lose_at is None else with_lease(CONFIG, 1.0)) as workers:
            router = await workers.router()
            prompt = prompt_of(70)
            workers.network.faults = faults
            with pytest.raises(TandemError):
                await router.generate(prompt, greedy(6))
            await workers.until(workers.all_free)
            workers.network.faults = Faults()
            first, tokens = await first_and_rest(router, prompt, 6)
            assert tokens == reference(prompt, 6)
            assert first.prefilled.cached_tokens > 0

    run(scenario())


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_random_cancels_among_shared_prefixes_leak_nothing(two_workers: Factory, reference: Reference, seed: int) -> None:
    """Prompts of three families in a pool too small for them, cut off at random; the survivors' tokens are right."""

    async def scenario() -> None:
        rng = random.Random(seed)
        async with two_workers(TIGHT) as workers:
            router = await workers.router()
            workers.network.faults = Faults(delay_s=0.001, die_at=rng.choice([None, rng.randrange(40)]))
            survivors = 0

            async def one(number: int) -> None:
                nonlocal survivors
                prompt = prompt_of(96, rng.randrange(3))[: rng.choice([40, 64, 96])] + prompt_of(rng.randrange(1, 40), number)
                try:
                    async with asyncio.timeout(rng.choice([None, rng.random() * 0.3])):
                        answer = await router.generate(prompt, greedy(4), str(number))
                except TimeoutError:
                    router.cancel(str(number))
                except TandemError:
                    pass
                else:
                    assert answer == reference(prompt, 4)
                    survivors += 1

            for _ in range(3):
                await asyncio.gather(*(one(number) for number in range(6)))
                workers.check()
            await workers.until(workers.all_free)
            assert survivors
            assert workers.prefill.core.load().prefix_cache_hits

    run(scenario())
