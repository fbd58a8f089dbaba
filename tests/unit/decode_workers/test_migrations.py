"""Streams that are sent one after the other: each router is answered in time, also where sending is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

from decode_workers.ledger import Ledger
from decode_workers.migrations import Migrations
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import Stream
from engine.memory.prefix_cache import PrefixCache
from kv_transfer.sender import OutgoingTransfer, PushPart
from protocol.messages.common import Failed
from protocol.messages.decode import Migrate, Migrated
from protocol.messages.workers import Ticket, WorkerRef
from protocol.sampling import SamplingParams
from router.dispatch.worker_calls import SEND_LEASES
from tests.unit.simulated_time import run_in_simulated_time

BLOCK = 4
PROMPT = 32 * BLOCK
LEASE_S = 10.0
TARGET = WorkerRef("decode-1", 1, "")


class SlowPair:
    """Takes most of a lease for a push of full blocks, and less for the rest."""

    peer = TARGET

    async def push(self, step: int, parts: Sequence[PushPart]) -> None:
        for part in parts:
            await asyncio.sleep(0.9 * LEASE_S if part.num_tokens >= BLOCK else 0.1)
            part.transfer.sent_tokens += part.num_tokens

    async def commit(self, transfer: OutgoingTransfer) -> None:
        await asyncio.sleep(0.1)

    def abort(self, transfer: OutgoingTransfer) -> None:
        pass


class Source:
    """A decode worker without an engine, whose streams all began with prompts of PROMPT tokens."""

    def __init__(self, num_streams: int) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        cache = PrefixCache(40 * num_streams)
        self.ledger = Ledger(
            cache, BLOCK, 1e9, loop.time, on_committed=lambda e: None, on_failed=lambda e: None, on_settled=lambda: None
        )
        self.scheduler = DecodeScheduler(self.ledger, num_streams, 64, 30.0, loop.time)
        self.ticket_ids = [self._stream(number) for number in range(num_streams)]
        self._migrations = Migrations(
            peers=_any(pair=_pair),
            ledger=self.ledger,
            scheduler=self.scheduler,
            loop=_any(flush=lambda: None, boundary=_at_once),
            send=lambda router, message: self.answers.put_nowait(message),
            spawn=self._spawn,
            on_change=lambda: None,
            lease_s=LEASE_S,
        )

    def migrate(self, call_id: int, ticket_id: int) -> None:
        """Ask for a stream as the router `r` does."""
        target = Ticket(ticket_id, ticket_id, TARGET, BLOCK, tuple(range(PROMPT // BLOCK)), PROMPT, 0)
        self._migrations.begin(b"r", Migrate(call_id, ticket_id, target))

    def _stream(self, number: int) -> int:
        token_ids = tuple(range(1000 * number, 1000 * number + PROMPT + 1))
        entry = self.ledger.reserve(b"r", token_ids[:-1], 9, "", own_tokens=1)
        assert entry is not None
        self.scheduler.attached.attach_here(entry.ticket_id)
        sampling = SamplingParams(seed=0, max_tokens=9)
        self.scheduler.add(Stream(entry.ticket_id, b"r", entry.block_table, sampling, list(token_ids), 1, PROMPT))
        return entry.ticket_id

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _any(**values: Any) -> Any:
    return SimpleNamespace(**values)


async def _pair(ref: WorkerRef) -> SlowPair:
    return SlowPair()


async def _at_once() -> None:
    pass


def test_no_router_waits_so_long_for_a_slow_source_that_it_gives_the_stream_up() -> None:
    """Twelve streams of which each takes a lease: those that are late stay, and leave when they are asked for again."""

    async def scenario() -> None:
        loop, source = asyncio.get_running_loop(), Source(12)
        waiting, rounds = dict(enumerate(source.ticket_ids)), 0
        while waiting:
            rounds, began = rounds + 1, loop.time()
            for call_id, ticket_id in waiting.items():
                source.migrate(call_id, ticket_id)
            for _ in tuple(waiting):
                answer = await source.answers.get()
                assert loop.time() - began < SEND_LEASES * LEASE_S, "the router would have given it up"
                if isinstance(answer, Migrated):
                    del waiting[answer.call_id]
                else:
                    assert isinstance(answer, Failed)
            assert all(ticket_id in source.scheduler for ticket_id in waiting.values())
        assert 2 < rounds <= 6

    run_in_simulated_time(scenario())
