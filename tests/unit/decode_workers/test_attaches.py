"""Streams that have been attached and wait for their grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from decode_workers.attaches import Attaches
from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from engine.grammar import Constraint, Grammars
from engine.memory.prefix_cache import PrefixCache
from protocol.errors import KvTransferError
from protocol.messages.common import Failed
from protocol.messages.decode import Attach, Attached
from protocol.sampling import SamplingParams
from tests.tiny_models import TINY
from tests.unit.simulated_time import run_in_simulated_time

BLOCK = 4
LEASE_S = 1.0
ROUTER = b"r"


class SlowGrammars:
    """Takes two leases and a half for each grammar."""

    async def constraint(self, grammar: str, answer: tuple[int, ...]) -> Constraint:
        await asyncio.sleep(2.5 * LEASE_S)
        return cast(Constraint, object())


@pytest.mark.parametrize("pings", [True, False])
def test_a_committed_ticket_waits_for_its_grammar_as_long_as_its_router_lives(pings: bool) -> None:
    async def main() -> None:
        loop, sent, tasks = asyncio.get_running_loop(), list[Any](), list[asyncio.Task[None]]()

        def spawn(task: Coroutine[Any, Any, None]) -> None:
            tasks.append(loop.create_task(task))

        ledger = Ledger(
            PrefixCache(10),
            BLOCK,
            LEASE_S,
            loop.time,
            on_committed=lambda entry: attaches.start_if_ready(entry),
            on_failed=lambda entry: attaches.failed(entry, KvTransferError("the ticket is expired")),
            on_settled=lambda: None,
        )
        scheduler = DecodeScheduler(ledger, 8, 64, 30.0, loop.time)
        attaches = Attaches(
            TINY,
            BLOCK,
            cast(Grammars, SlowGrammars()),
            ledger,
            scheduler,
            lambda router, message: sent.append(message),
            spawn,
            lambda: None,
            None,
        )
        sampling = SamplingParams(seed=1, max_tokens=8, grammar="start: /a/", presence_penalty=0.5)
        entry = ledger.reserve(ROUTER, (5, 6, 7), 8, "")
        assert entry is not None
        attaches.ask(ROUTER, Attach(1, entry.ticket_id, 9, sampling, 1))
        ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, 0, 3)
        ledger.end_push(entry.ticket_id, 3, ok=True)
        assert ledger.commit(entry.ticket_id, entry.transfer_id, 3)
        while not sent:
            await asyncio.sleep(LEASE_S / 4)
            if pings:
                ledger.renew(ROUTER, attaches.waiting())
            ledger.expire()
        assert [type(message) for message in sent] == [Attached if pings else Failed]
        for stream in scheduler.streams:
            assert list(stream.token_ids) == [5, 6, 7, 9]
            assert memoryview(stream.token_ids).format == "q", "penalties read it in place"  # type: ignore[arg-type]
        await asyncio.gather(*tasks)

    run_in_simulated_time(main())
