"""Blocks out of another worker's pool: what was fetched says what would have been computed, and what goes wrong costs time."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from typing import Any

import pytest

from configs.schema import ClusterConfig
from kv_transfer.fetching import lender
from kv_transfer.transports.loopback import Faults
from protocol.cache.fetch import Fetch
from protocol.cache.keys import block_keys
from protocol.errors import InvalidRequestError, KvTransferError, OverloadedError
from protocol.messages.decode import Prefilled, Release
from protocol.messages.prefill import FetchFrom, FirstToken
from protocol.messages.workers import Role, Ticket
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import with_lease

BLOCK_SIZE = 8
CONFIG = ClusterConfig.model_validate(
    {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "prefill": {"kv_cache_tokens": 256, "max_batch_tokens": 32},
        "decode": {"kv_cache_tokens": 2048},
        "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
    }
)
LENGTH = 100
HELD = 96
"""Of a prompt of that length, in whole blocks."""


async def ask(workers: Any, router: Any, prompt: list[int], fetch: FetchFrom | None, salt: str = "") -> tuple[Any, list[int]]:
    """A request of eight tokens; what was told of its prompt, and all tokens. Nothing of it is held by its ticket."""
    sampling = greedy(8)
    ticket = await router.reserve(prompt, 8, salt, own_tokens=len(prompt))
    try:
        first: FirstToken = await router.compute(ticket, prompt, sampling, cache_salt=salt, fetch=fetch)
        await router.attach(ticket, first, sampling)
        return first.prefilled, [first.token_id, *await router.rest(ticket)]
    finally:
        router.decode.send(Release(ticket.ticket_id))
        await workers.until(workers.all_free)


async def only_decode_holds(workers: Any, router: Any, prompt: list[int], salt: str = "") -> FetchFrom:
    """Have the decode worker hold the prompt, and the prefill worker forget it."""
    await ask(workers, router, prompt, None, salt)
    for seed in range(1, 4):
        await router.generate(prompt_of(120, seed), greedy(1))
    await workers.until(workers.all_free)
    return FetchFrom(workers.decode.me, HELD)


@pytest.mark.parametrize("longer", [0, 1, 37])
def test_what_another_pool_holds_is_not_computed(two_workers: Factory, reference: Reference, longer: int) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
            prompt = prompt_of(LENGTH) + prompt_of(longer, 5)
            computed = workers.prefill.core.load().tokens
            began = time.monotonic()
            prefilled, tokens = await ask(workers, router, prompt, fetch)
            assert 0 < prefilled.brought.peer_s < time.monotonic() - began
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.peer_tokens == prefilled.cached_tokens == HELD
            assert workers.prefill.core.load().tokens == computed + len(prompt) - HELD
            again, tokens_again = await ask(workers, router, prompt, fetch)
            assert tokens_again == tokens
            assert again.brought.num_tokens == 0, "it lies here now"
            assert again.cached_tokens >= HELD

    run(scenario())


def test_who_has_streams_that_wait_for_blocks_lends_none(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(workers.decode, "growth", lambda shared=(): None)
                prefilled, tokens = await ask(workers, router, prompt, fetch)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.num_tokens == workers.decode.core.lender.lent_tokens == 0

    run(scenario())


def test_nothing_is_fetched_into_blocks_that_streams_wait_for(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            for growth in (None, workers.prefill._cache.num_blocks, 0):
                salt = str(growth)
                fetch = await only_decode_holds(workers, router, prompt, salt)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(workers.prefill._fetching, "_growth", lambda shared, growth=growth: growth)
                    prefilled, tokens = await ask(workers, router, prompt, fetch, salt)
                assert tokens == reference(prompt, 8)
                assert prefilled.brought.peer_tokens == (HELD if growth == 0 else 0)

    run(scenario())


def test_a_loan_ends_when_the_lender_needs_its_blocks(two_workers: Factory, reference: Reference) -> None:
    """What was sent until then is of use."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            growth = iter([0, 0, None])  # when it is asked, after the first piece, after the second
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lender, "PIECE_TOKENS", 16)
                patch.setattr(workers.decode.core.lender, "_growth", lambda shared: next(growth))
                prefilled, tokens = await ask(workers, router, prompt, fetch)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.peer_tokens == workers.decode.core.lender.lent_tokens == 32

    run(scenario())


def test_of_what_is_too_much_for_a_loan_a_part_is_lent(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lender, "MOST_SHARE", 8 / 256)
                prefilled, tokens = await ask(workers, router, prompt, fetch)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.peer_tokens == HELD / 2, "12 blocks are more than 8, and 6 are not"

    run(scenario())


def test_a_fetch_leaves_blocks_to_prompts_that_wait(two_workers: Factory, reference: Reference) -> None:
    """It would take 20 of the prefill worker's 32."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(165)
            await only_decode_holds(workers, router, prompt)
            fetch = FetchFrom(workers.decode.me, 160)
            for waiting, brought in ((1, 0), (0, 160)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(workers.prefill._fetching, "_num_queued", lambda waiting=waiting: waiting)
                    prefilled, tokens = await ask(workers, router, prompt, fetch)
                assert tokens == reference(prompt, 8)
                assert prefilled.brought.num_tokens == brought
                await only_decode_holds(workers, router, prompt)

    run(scenario())


def test_a_part_that_is_there_is_not_fetched(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            await router.generate(prompt[:41], greedy(1))
            prefilled, tokens = await ask(workers, router, prompt, fetch)
            assert tokens == reference(prompt, 8)
            assert (prefilled.brought.peer_tokens, prefilled.cached_tokens) == (HELD - 40, HELD)

    run(scenario())


def test_what_the_other_no_longer_holds_is_computed(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            prefilled, tokens = await ask(workers, router, prompt, FetchFrom(workers.decode.me, HELD))
            assert tokens == reference(prompt, 8)
            assert (prefilled.brought.num_tokens, prefilled.cached_tokens) == (0, 0)

    run(scenario())


def test_the_lender_may_hold_less_than_was_thought(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            await only_decode_holds(workers, router, prompt_of(LENGTH))
            prompt = prompt_of(LENGTH) + prompt_of(60, 5)
            prefilled, tokens = await ask(workers, router, prompt, FetchFrom(workers.decode.me, 152))
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.peer_tokens == HELD

    run(scenario())


def test_tenants_fetch_nothing_of_each_other(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt, salt="acme/")
            prefilled, tokens = await ask(workers, router, prompt, fetch, salt="other/")
            assert tokens == reference(prompt, 8)
            assert (prefilled.brought.num_tokens, prefilled.cached_tokens) == (0, 0)
            prefilled, _ = await ask(workers, router, prompt, fetch, salt="acme/")
            assert prefilled.brought.peer_tokens == HELD

    run(scenario())


@pytest.mark.parametrize("named", ["arithmetic", "weights"])
def test_workers_that_compute_something_else_are_not_asked(two_workers: Factory, reference: Reference, named: str) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            changes: dict[str, Any] = {named: "another"}
            replaced = dataclasses.replace(fetch.worker, **changes)
            other = dataclasses.replace(fetch, worker=replaced)
            prefilled, tokens = await ask(workers, router, prompt, other)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.num_tokens == 0

    run(scenario())


async def fetch_damaged(workers: Any, router: Any, faults: dict[str, int]) -> tuple[Prefilled, list[int]]:
    """The first payload after `faults` are set is the fetch's."""
    fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
    first = workers.network.payloads_sent
    at = {name: first if value < 0 else value for name, value in faults.items()}
    workers.network.faults = Faults(**at)
    result: tuple[Prefilled, list[int]] = await ask(workers, router, prompt_of(LENGTH), fetch)
    return result


@pytest.mark.parametrize(
    "faults",
    [
        {"flip_bit_at": -1},
        {"truncate_at": -1},
        {"swap_halves_at": -1},
        {"swap_blocks_at": -1, "block_bytes": 1024},
        {"lose_at": -1},
        {"die_at": -1},
    ],
    ids=lambda faults: next(iter(faults)),
)
def test_damage_is_found_and_computed_anew(two_workers: Factory, reference: Reference, faults: dict[str, int]) -> None:
    async def scenario() -> None:
        async with two_workers(with_lease(CONFIG, 1.0) if "lose_at" in faults else CONFIG) as workers:
            router = await workers.router()
            prefilled, tokens = await fetch_damaged(workers, router, faults)
            assert tokens == reference(prompt_of(LENGTH), 8)
            assert (prefilled.brought.num_tokens, prefilled.cached_tokens) == (0, 0)
            assert prefilled.brought.peer_s > 0
            workers.network.faults = Faults()
            fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
            workers.prefill._fetching._failed_at.clear()
            prefilled, tokens = await ask(workers, router, prompt_of(LENGTH), fetch)
            assert tokens == reference(prompt_of(LENGTH), 8)
            assert prefilled.brought.peer_tokens == HELD, "the next fetch has a new channel"

    run(scenario())


def test_a_lender_that_dies_in_the_middle_costs_time_only(two_workers: Factory, reference: Reference) -> None:
    """The prompt's answer is one token long, so the decode worker is needed for nothing else."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            ticket = await router.reserve(prompt, 1)
            sent = workers.network.payloads_sent
            workers.network.faults = Faults(delay_s=0.3)
            computing = asyncio.create_task(router.compute(ticket, prompt, greedy(1), fetch=fetch))
            await workers.until(lambda: workers.network.payloads_sent > sent)
            workers.tasks[Role.DECODE.value].cancel()
            await asyncio.wait([workers.tasks[Role.DECODE.value]])
            first = await computing
            assert first.token_id == reference(prompt, 1)[0]
            assert first.prefilled.brought.num_tokens == 0
            await workers.bury(Role.DECODE)
            load = workers.prefill.core.load
            await workers.until(lambda: load().free_blocks == load().total_blocks)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(4, 12, thorough=30))
def test_random_fetches_and_cancels_leak_nothing(two_workers: Factory, reference: Reference, seed: int) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
            first = workers.network.payloads_sent
            workers.network.faults = Faults(delay_s=0.005 * (seed % 3), flip_bit_at=first + 3 * seed)
            prompts = [prompt_of(LENGTH) + prompt_of(1 + 9 * n, seed) for n in range(4)]
            tickets = [await router.reserve(prompt, 1) for prompt in prompts]
            asked = [
                asyncio.create_task(router.compute(ticket, prompt, greedy(1), request_id=f"r-{n}", fetch=fetch))
                for n, (ticket, prompt) in enumerate(zip(tickets, prompts, strict=True))
            ]
            await asyncio.sleep(0.002 * seed)
            router.cancel(f"r-{seed % 4}")
            for n, (task, prompt) in enumerate(zip(asked, prompts, strict=True)):
                if n == seed % 4:
                    task.cancel()
                else:
                    answer = await task
                    assert answer.token_id == reference(prompt, 1)[0]
                workers.check()
            for ticket in tickets:
                router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_questions_that_make_no_sense_are_refused(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            me = workers.prefill.me
            keys = tuple(bytes([number]) * 32 for number in range(4))

            async def fetch(ticket: Ticket) -> None:
                await router.decode.ask(lambda call_id: Fetch(call_id, ticket, keys), 5)

            good = Ticket(1, 2, me, BLOCK_SIZE, (), 4 * BLOCK_SIZE, 0)
            for wrong in (
                dataclasses.replace(good, block_size=16),
                dataclasses.replace(good, num_prompt_tokens=3 * BLOCK_SIZE),
                dataclasses.replace(good, held_tokens=4 * BLOCK_SIZE),
                dataclasses.replace(good, held_tokens=-8),
                dataclasses.replace(good, held_tokens=3),
            ):
                with pytest.raises(InvalidRequestError):
                    await fetch(wrong)
            with pytest.raises(KvTransferError, match="not cached here"):
                await fetch(good)
            prompt = prompt_of(4 * BLOCK_SIZE)
            await ask(workers, router, prompt, None)
            keys = tuple(block_keys(prompt, BLOCK_SIZE, "")[:2] * 2)
            with pytest.raises(InvalidRequestError, match="twice"):
                await fetch(good)

    run(scenario())


def test_who_waits_for_lent_blocks_goes_on_when_the_loan_is_over(two_workers: Factory, reference: Reference) -> None:
    """Nothing else happens at that worker that would have it look again."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            lent = prompt_of(LENGTH)
            await router.generate(lent, greedy(1))
            await workers.until(workers.all_free)
            keys = block_keys(lent, BLOCK_SIZE, "")[: HELD // BLOCK_SIZE]
            cache = workers.prefill._cache
            pin = cache.pin("lent", len(keys), keys, time.monotonic() + 60.0)
            assert pin is not None
            long = prompt_of(200, 7)
            ticket = await router.reserve(long, 1)
            computing = asyncio.create_task(router.compute(ticket, long, greedy(1)))
            await workers.until(lambda: cache.lacking)
            assert cache.pin("lent", 1, keys[:1], 0.0) is None, "prompts go first"
            cache.unpin(pin, keys)
            workers.prefill.core.lender._on_change()
            assert (await computing).token_id == reference(long, 1)[0]
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_prompts_that_lack_the_same_blocks_fetch_them_once(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
            before = workers.decode.core.load().lent_tokens
            workers.network.faults = Faults(delay_s=0.02)
            prompts = [[*prompt_of(LENGTH), number] for number in range(1, 4)]
            tickets = [await router.reserve(prompt, 1) for prompt in prompts]
            asked = (
                router.compute(ticket, prompt, greedy(1), fetch=fetch) for ticket, prompt in zip(tickets, prompts, strict=True)
            )
            answers = await asyncio.gather(*asked)
            assert [answer.token_id for answer in answers] == [reference(prompt, 1)[0] for prompt in prompts]
            assert all(answer.prefilled.cached_tokens >= HELD for answer in answers)
            assert workers.decode.core.load().lent_tokens == before + HELD
            for ticket in tickets:
                router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_what_two_prompts_lacked_is_not_fetched_once_both_were_cancelled(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router, fetching = await workers.router(), workers.prefill._fetching
            fetch = await only_decode_holds(workers, router, prompt_of(LENGTH))
            before = workers.decode.core.load().lent_tokens
            fetching._computed_s = lambda num_tokens: 0.0  # not known: so each waits for its turn
            while not fetching._turns.locked():
                await fetching._turns.acquire()
            asked = []
            for number in (1, 2):
                prompt = [*prompt_of(LENGTH), number]
                ticket = await router.reserve(prompt, 1)
                asked.append(asyncio.create_task(router.compute(ticket, prompt, greedy(1), f"r-{number}", fetch=fetch)))
            await workers.until(lambda: any(coming.others for coming in fetching._coming.values()))
            for number, task in enumerate(asked, 1):
                router.cancel(f"r-{number}")
                task.cancel()
            await workers.until(lambda: not len(workers.prefill._jobs))
            fetching._turns.release()
            await workers.until(lambda: not fetching._coming)
            assert workers.decode.core.load().lent_tokens == before
            for ticket_id in [entry.ticket_id for entry in workers.decode.ledger]:
                router.decode.send(Release(ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("purpose", ["fetched", "offloaded"])
def test_a_prompt_does_not_wait_for_blocks_that_a_disk_never_lets_go(two_workers: Factory, purpose: str) -> None:
    """It is sent back, when nothing else can be expected any more. Others are computed meanwhile."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            cache = workers.prefill._cache
            pin = cache.pin(purpose, cache.num_blocks // 2, [], time.monotonic() + 1.0)
            assert pin is not None
            long = prompt_of(BLOCK_SIZE * (cache.num_blocks // 2 + 1), 7)
            ticket = await router.reserve(long, 1)
            with pytest.raises(OverloadedError, match="others hold"):
                await router.compute(ticket, long, greedy(1))
            router.decode.send(Release(ticket.ticket_id))
            await router.generate(prompt_of(LENGTH), greedy(1))
            cache.unpin(pin, [])
            await workers.until(workers.all_free)

    run(scenario())


def test_blocks_that_a_disk_never_lets_go_count_once_and_not_for_who_shares_them(
    two_workers: Factory, reference: Reference
) -> None:
    """Two reads hang behind the same beginning. A longer prompt that begins so gets the rest, and another is refused."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            cache = workers.prefill._cache
            chat = prompt_of(BLOCK_SIZE * (cache.num_blocks // 2), 7)
            await router.generate(chat, greedy(1))
            await workers.until(workers.all_free)
            keys = block_keys(chat, BLOCK_SIZE, "")
            keys = keys[: cache.match(keys)]
            pins = [cache.pin("fetched", len(keys) + 1, keys, 0.0) for _ in range(2)]
            longer = [*chat, *prompt_of(BLOCK_SIZE * (cache.num_blocks // 2 - 4), 8)]
            assert await router.generate(longer, greedy(1)) == reference(longer, 1)
            ticket = await router.reserve(longer[1:], 1)
            with pytest.raises(OverloadedError, match="others hold"):
                await router.compute(ticket, longer[1:], greedy(1))
            router.decode.send(Release(ticket.ticket_id))
            for pin in pins:
                assert pin is not None
                cache.unpin(pin, keys)
            await workers.until(workers.all_free)

    run(scenario())


def test_fetches_that_go_on_and_on_hold_up_nobody(two_workers: Factory, reference: Reference) -> None:
    """Neither a prompt for which there is nothing to fetch, nor one that is sooner computed than it has its turn."""

    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            fetch = await only_decode_holds(workers, router, prompt)
            fetching = workers.prefill._fetching
            for _ in range(4):
                await fetching._turns.acquire()
            async with asyncio.timeout(CONFIG.limits.lease_s / 2):
                for salt in ("one", "two"):
                    await ask(workers, router, prompt[:20], None, salt)  # a block of it is there
                    number = BLOCK_SIZE if salt == "one" else HELD
                    prefilled, tokens = await ask(workers, router, prompt, dataclasses.replace(fetch, num_tokens=number), salt)
                    assert tokens == reference(prompt, 8)
                    assert prefilled.brought.num_tokens == 0
            for _ in range(4):
                fetching._turns.release()
            prefilled, _ = await ask(workers, router, prompt, fetch)
            assert prefilled.brought.peer_tokens == HELD

    run(scenario())


def test_a_lender_that_brings_nothing_is_left_alone_for_a_while(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        async with two_workers(CONFIG) as workers:
            router = await workers.router()
            workers.prefill._fetching._lenders._limits = CONFIG.limits.model_copy(update={"connect_s": 0.3})
            prompt = prompt_of(LENGTH)
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            nowhere = FetchFrom(dataclasses.replace(workers.decode.me, address=address), HELD)
            prefilled, tokens = await ask(workers, router, prompt, nowhere)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.num_tokens == 0
            assert prefilled.brought.peer_s > 0.1, "so routers know"
            failed = workers.prefill.core.load().failed_fetches
            other = prompt_of(LENGTH, 3)
            prefilled, tokens = await ask(workers, router, other, nowhere)
            assert tokens == reference(other, 8)
            assert (prefilled.brought.peer_s, workers.prefill.core.load().failed_fetches) == (0.0, failed)
        silent.close()

    run(scenario())
