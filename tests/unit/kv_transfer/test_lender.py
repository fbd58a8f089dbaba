"""What a lender sends and counts between two real ends, and what it leaves to its own worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from engine.memory.prefix_cache import PrefixCache
from kv_transfer.fetching.lender import Lender
from kv_transfer.peers import DecodePeers
from kv_transfer.transports.loopback import LoopbackNetwork
from protocol.cache.fetch import Fetch, Fetched
from protocol.cache.keys import block_keys
from protocol.errors import OverloadedError
from protocol.messages.workers import Ticket, WorkerRef
from tests.unit.kv_transfer.two_ends import BLOCK_SIZE, BLOCKS, HEADS, LEASE_S, pool, world

TOKENS = 3 * BLOCK_SIZE


def test_lent_bytes_are_those_of_the_tokens_that_were_sent() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()], targets=[pool()]) as w:
            pair = await w.pair()
            cache, keys = PrefixCache(BLOCKS), block_keys(range(TOKENS), BLOCK_SIZE, "")
            table = cache.allocate(len(keys), ())
            assert table is not None
            cache.insert(keys, table)
            cache.release(keys, table)
            answers: list[Any] = []
            running: list[asyncio.Task[None]] = []

            async def opened(peer: object) -> Any:
                return pair

            lender = Lender(
                cache,
                BLOCK_SIZE,
                cast(DecodePeers, SimpleNamespace(pair=opened)),
                lambda peer, message: answers.append(message),
                lambda work: running.append(asyncio.create_task(cast(Any, work))),
                lambda: None,
                LEASE_S,
                growth=lambda shared: 0,
            )
            ticket, _ = w.decode.ticket(TOKENS)
            lender.ask(b"borrower", Fetch(7, ticket, tuple(keys)))
            await asyncio.gather(*running)
            assert answers == [Fetched(7, TOKENS)]
            assert lender.lent_tokens == TOKENS
            assert lender.lent_bytes == sum(w.sent) == TOKENS * HEADS * w.source.head_bytes
            await pair.close()

    asyncio.run(scenario())


def test_a_loan_leaves_the_blocks_that_the_lenders_own_streams_want_next() -> None:
    cache, keys = PrefixCache(10), block_keys(range(10 * BLOCK_SIZE), BLOCK_SIZE, "")
    table = cache.allocate(len(keys), ())
    assert table is not None
    cache.insert(keys, table)
    cache.release(keys, table)
    pins: list[Sequence[int]] = []
    refusals: list[Any] = []
    growth: list[int | None] = [9, 10, None]

    def lend(work: Any) -> None:
        work.close()
        pins.extend(pin.table for pin in cache.pins)
        for pin in list(cache.pins):
            cache.unpin(pin, keys[: len(pin.table)])

    lender = Lender(
        cache,
        BLOCK_SIZE,
        cast(DecodePeers, None),
        lambda peer, message: refusals.append(message.code),
        lend,
        lambda: None,
        LEASE_S,
        growth=lambda shared: growth.pop(0) if len(shared) == 1 else 9,
    )
    ticket = Ticket(1, 2, WorkerRef("borrower", 1, "127.0.0.1:1"), BLOCK_SIZE, (), 10 * BLOCK_SIZE, 0)
    for _ in range(3):
        lender.ask(b"borrower", Fetch(7, ticket, tuple(keys)))
    assert [len(pinned) for pinned in pins] == [1]
    assert refusals == [OverloadedError.code] * 2
