"""The handoff end to end in one process: right tokens, and nothing left behind whatever goes wrong."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from configs.schema import ClusterConfig
from kv_transfer.transports.loopback import Faults, LoopbackTransport
from protocol.errors import InvalidRequestError, OverloadedError, TandemError, UnavailableError
from protocol.messages.decode import Release
from protocol.messages.workers import WorkerRef
from protocol.sampling import SamplingParams
from protocol.wire import WireClient
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run
from tests.fault.two_workers import CONFIG, with_lease

ROOMY = ClusterConfig.model_validate(
    {
        "dtype": "float32",
        "block_size": 8,
        "prefill": {"kv_cache_tokens": 32768, "max_batch_tokens": 32},
        "decode": {"kv_cache_tokens": 32768},
        "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
    }
)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31, 32, 33, 100])
def test_tokens_are_those_of_the_reference(two_workers: Factory, reference: Reference, length: int) -> None:
    """Around block and chunk borders, through prefill, handoff and decode."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            prompt = prompt_of(length)
            assert await router.generate(prompt, greedy(12)) == reference(prompt, 12)
            await workers.until(workers.all_free)

    run(scenario())


def test_many_at_once_join_and_leave(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            routers = [await workers.router() for _ in range(2)]
            cases = [(prompt_of(1 + 5 * n, n), 1 + n % 9) for n in range(16)]
            answers = await asyncio.gather(
                *(routers[n % 2].generate(prompt, greedy(count)) for n, (prompt, count) in enumerate(cases))
            )
            assert answers == [reference(prompt, count) for prompt, count in cases]
            await workers.until(workers.all_free)

    run(scenario())


def test_seeded_sampling_does_not_depend_on_company(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            params = [SamplingParams(seed=n, max_tokens=10, temperature=0.8, top_p=0.9) for n in range(8)]
            alone = [await router.generate(prompt_of(20, n), params[n]) for n in range(8)]
            together = await asyncio.gather(
                *(router.generate(prompt_of(20, n), params[n], cache_salt="together") for n in range(8))
            )
            assert together == alone
            assert len({tuple(answer) for answer in alone}) > 1, "different seeds say different things"

    run(scenario())


def test_full_means_full(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            tickets = [await router.reserve(prompt_of(480), 101) for _ in range(2)]
            with pytest.raises(OverloadedError) as refusal:
                await router.reserve(prompt_of(100), 10)
            assert refusal.value.retry_after_s is not None
            with pytest.raises(InvalidRequestError, match="128 KV blocks"):
                await router.reserve(prompt_of(1000), 100)
            for ticket in tickets:
                router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)
            ticket = await router.reserve(prompt_of(100), 100)
            assert len(ticket.block_table) == 14, "the answer's other blocks come later"
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


BLOCK_BYTES = 8 * 2 * 8 * 4
"""Of one block's K in one layer of the small model."""
DAMAGE: dict[str, Callable[[int], Faults]] = {
    "flip": lambda at: Faults(flip_bit_at=at),
    "truncate": lambda at: Faults(truncate_at=at),
    "swap K and V": lambda at: Faults(swap_halves_at=at),
    "swap blocks": lambda at: Faults(swap_blocks_at=at, block_bytes=BLOCK_BYTES),
    "lose": lambda at: Faults(lose_at=at),
    "die": lambda at: Faults(die_at=at),
}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(make(at), id=f"{name} {at}")
        for name, make in DAMAGE.items()
        for at in (range(3) if name != "lose" else [0])
    ],
)
def test_no_token_is_made_from_a_damaged_transfer(two_workers: Factory, reference: Reference, faults: Faults) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG if faults.lose_at is None else with_lease(CONFIG, 1.0)) as workers:
            router = await workers.router()
            workers.network.faults = faults
            with pytest.raises(TandemError):
                await router.generate(prompt_of(70), greedy(8))
            await workers.until(workers.all_free)
            workers.network.faults = Faults()
            assert await router.generate(prompt_of(70), greedy(8)) == reference(prompt_of(70), 8)

    run(scenario())


def test_decode_is_told_of_a_prompt_that_was_cancelled_before_there_was_a_way_to_it(
    two_workers: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with two_workers(CONFIG) as workers:
            router, peers = await workers.router(), workers.prefill.core.peers
            asked, reached, pair = asyncio.Event(), asyncio.Event(), peers.pair

            async def reached_late(worker: WorkerRef) -> Any:
                asked.set()
                await reached.wait()
                return await pair(worker)

            monkeypatch.setattr(peers, "pair", reached_late)
            ticket = await router.reserve(prompt_of(5), 4)
            computing = asyncio.create_task(router.compute(ticket, prompt_of(5), greedy(4)))
            await asked.wait()
            router.cancel("r")
            await workers.until(lambda: not len(workers.prefill._jobs))
            reached.set()
            await workers.until(workers.all_free)
            computing.cancel()

    run(scenario())


def test_cancelled_prefills_do_not_hold_up_a_short_request(two_workers: Factory) -> None:
    """Ten prompts of 2,000 tokens cancelled at once, then a short one: it waits for the chunk under way and no more."""

    # Made before any lease runs: it takes long on a busy machine.
    prompts = [prompt_of(2000, n) for n in range(10)]

    async def scenario() -> None:
        async with two_workers(ROOMY) as workers:
            router = await workers.router()
            tickets = [await router.reserve(prompt, 4) for prompt in prompts]
            pending = [
                asyncio.create_task(router.compute(ticket, prompt, greedy(4), request_id=str(n)))
                for n, (ticket, prompt) in enumerate(zip(tickets, prompts, strict=True))
            ]
            await workers.until(lambda: workers.prefill.core.load().tokens > 0)
            for n, ticket in enumerate(tickets):
                router.cancel(str(n))
                router.decode.send(Release(ticket.ticket_id))
            await workers.until(lambda: workers.prefill.core.load().waiting == 0)
            before = workers.prefill.core.load().steps
            short = await router.reserve(prompt_of(5), 2)
            await router.compute(short, prompt_of(5), greedy(2), request_id="short")
            assert workers.prefill.core.load().steps - before <= 2, "the step under way and its own"
            assert workers.prefill.core.load().tokens < 10_000, "what was cancelled was not computed"
            for task in pending:
                task.cancel()
            router.decode.send(Release(short.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_a_router_that_vanishes_leaves_nothing(two_workers: Factory) -> None:
    """Its tickets, prompts and streams are taken back, in whatever phase they were."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            await router.reserve(prompt_of(40), 10)
            ticket = await router.reserve(prompt_of(40), 400)
            first = await router.compute(ticket, prompt_of(40), greedy(400))
            if first.finish_reason is None:
                await router.attach(ticket, first, greedy(400))
            router.prefill.close()
            router.decode.close()
            await workers.until(workers.all_free)

    run(scenario())


def test_a_silent_router_loses_its_lease(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers(with_lease(CONFIG, 1.0)) as workers:
            router = await workers.router(ping=False)
            await router.reserve(prompt_of(40), 10)
            assert not workers.all_free()
            await workers.until(workers.all_free, seconds=5)

    run(scenario())


def test_a_process_that_was_held_for_a_lease_keeps_what_its_router_renews(two_workers: Factory, reference: Reference) -> None:
    """The messages that renew a reservation are sent, or read, only when the process goes on."""

    async def scenario() -> None:
        async with two_workers(with_lease(CONFIG, 1.0)) as workers:
            router = await workers.router()
            ticket = await router.reserve(prompt_of(40), 10)
            time.sleep(1.5)  # noqa: ASYNC251 - that is the hold
            await asyncio.sleep(1.5)
            first = await router.compute(ticket, prompt_of(40), greedy(10))
            await router.attach(ticket, first, greedy(10))
            assert [first.token_id, *await router.rest(ticket)] == reference(prompt_of(40), 10)
            router.release(ticket)
            await workers.until(workers.all_free)

    run(scenario())


def test_death_of_prefill_gives_decode_its_blocks_back(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            workers.network.faults = Faults(delay_s=0.05)
            ticket = await router.reserve(prompt_of(400), 10)
            computing = asyncio.create_task(router.compute(ticket, prompt_of(400), greedy(10)))
            await workers.until(lambda: workers.decode.core.load().transfers > 0)
            workers.tasks["prefill"].cancel()
            await asyncio.wait((computing, workers.tasks["prefill"]))
            await workers.until(lambda: workers.decode.core.load().tickets == 0)
            assert workers.decode.core.load().free_blocks == workers.decode.core.load().total_blocks

    run(scenario())


def test_death_of_decode_gives_prefill_its_blocks_back(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            workers.network.faults = Faults(delay_s=0.05)
            ticket = await router.reserve(prompt_of(400), 10)
            computing = asyncio.create_task(router.compute(ticket, prompt_of(400), greedy(10)))
            await workers.until(lambda: workers.decode.core.load().transfers > 0)
            workers.tasks["decode"].cancel()
            await asyncio.wait((computing, workers.tasks["decode"]))
            await workers.until(lambda: workers.prefill.core.load().tickets == 0)
            assert workers.prefill.core.load().free_blocks == workers.prefill.core.load().total_blocks

    run(scenario())


def out_of_descriptors(*_: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def out_of_sockets(*_: object) -> Any:
    raise zmq.ZMQError(errno.EMFILE)


LACKS: list[tuple[type[Any], str, Any]] = [
    (LoopbackTransport, "connect_sender", out_of_descriptors),
    (LoopbackTransport, "connect_receiver", out_of_descriptors),
    (WireClient, "__init__", out_of_sockets),
]


@pytest.mark.parametrize(("owner", "name", "lack"), LACKS, ids=[name for _, name, _ in LACKS])
def test_a_machine_without_descriptors_for_a_moment_ends_no_worker(
    two_workers: Factory, reference: Reference, monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str, lack: Any
) -> None:
    """When a pair of workers is to be connected. What was asked then fails, and the next is answered."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, lack)
                with pytest.raises(UnavailableError):  # routers try another worker then
                    await router.generate(prompt_of(20), greedy(4))
            assert await router.generate(prompt_of(20), greedy(4), "again") == reference(prompt_of(20), 4)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(5, 20, thorough=1000))
def test_random_cancels_and_faults_leak_nothing(two_workers: Factory, reference: Reference, seed: int) -> None:
    """Requests that are cut off at a random moment among faults at random payloads; the survivors' tokens are right."""

    async def scenario() -> None:
        rng = random.Random(seed)
        async with two_workers(with_lease(CONFIG, 1.0)) as workers:
            router = await workers.router()
            workers.network.faults = Faults(
                delay_s=0.001,
                flip_bit_at=rng.randrange(20),
                truncate_at=rng.randrange(20),
                swap_halves_at=rng.randrange(20),
                swap_blocks_at=rng.randrange(20),
                block_bytes=BLOCK_BYTES,
                lose_at=rng.choice([None, None, rng.randrange(15)]),
                die_at=rng.choice([None, rng.randrange(15)]),
            )

            async def one(number: int) -> None:
                prompt, count = prompt_of(rng.randrange(1, 120), number), rng.randrange(1, 12)
                try:
                    async with asyncio.timeout(rng.choice([None, rng.random() * 0.2])):
                        answer = await router.generate(prompt, greedy(count), str(number))
                except TimeoutError:
                    router.cancel(str(number))
                except TandemError:
                    pass
                else:
                    assert answer == reference(prompt, count)

            await asyncio.gather(*(one(number) for number in range(8)))
            await workers.until(workers.all_free)

    run(scenario())
