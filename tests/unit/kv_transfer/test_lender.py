"""What a lender counts of what it has sent, between two real ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from engine.memory.prefix_cache import PrefixCache
from kv_transfer.fetching.lender import Lender
from kv_transfer.peers import DecodePeers
from kv_transfer.transports.loopback import LoopbackNetwork
from protocol.cache.fetch import Fetch, Fetched
from protocol.cache.keys import block_keys
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
                can_spare=lambda: True,
            )
            ticket, _ = w.decode.ticket(TOKENS)
            lender.ask(b"borrower", Fetch(7, ticket, tuple(keys)))
            await asyncio.gather(*running)
            assert answers == [Fetched(7, TOKENS)]
            assert lender.lent_tokens == TOKENS
            assert lender.lent_bytes == sum(w.sent) == TOKENS * HEADS * w.source.head_bytes
            await pair.close()

    asyncio.run(scenario())
