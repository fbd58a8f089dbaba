"""Sender and receiver with a real ledger, a real pool on each side and real sockets, in one process, without engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from decode_workers.ledger import Ledger
from decode_workers.ticket_entry import TicketEntry
from engine.kv_pool import KVPool
from engine.prefix_cache import PrefixCache
from kv_transfer.gloo import GlooTransport
from kv_transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import ReceivingPair, TransferStats
from kv_transfer.sender import SendingPair, StepSignal
from kv_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.endpoint import Endpoint
from protocol.messages import KvLayout, LoadReport, PairOpen, PushAnnounce, PushCommit, Role, Ticket, TransferAbort, WorkerRef
from protocol.wire import WireServer

SECRET = b"k" * 32
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 3, 2, 8, 4, 16
LAYOUT = KvLayout("hash", "float32", LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, 1)
PREFILL = WorkerRef("prefill-0", 1, Role.PREFILL, "tcp://127.0.0.1:1")
LEASE_S = 1.0


def pool() -> KVPool:
    return KVPool(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        shared=True,
    )


class Decode:
    """The receiving half of a decode worker: ledger, pairs and socket, without an engine."""

    def __init__(self, transports: Sequence[ReceiveTransport]) -> None:
        self.pool = pool()
        self.pool.data.zero_()
        self.blocks = PrefixCache(BLOCKS)
        self.committed: list[int] = []
        self.failed: list[int] = []
        self.ledger = Ledger(
            self.blocks,
            BLOCK_SIZE,
            BLOCK_SIZE,
            60.0,
            time.monotonic,
            on_committed=lambda entry: self.committed.append(entry.ticket_id),
            on_failed=lambda entry: self.failed.append(entry.ticket_id),
            on_settled=lambda: None,
            shares_prefixes=True,
        )
        self.stats = TransferStats()
        self.pairs: dict[bytes, ReceivingPair] = {}
        self.transports = transports
        server = WireServer(SECRET, "127.0.0.1")
        self.ref = WorkerRef("decode-0", 5, Role.DECODE, server.address)
        handlers: dict[type[Any], Callable[[bytes, Any], None]] = {
            PairOpen: self.open_pair,
            PushAnnounce: lambda peer, message: self.pairs[peer].announce(message),
            PushCommit: lambda peer, message: self.pairs[peer].commit(message),
            TransferAbort: lambda peer, message: self.ledger.abort_transfer(message.ticket_id, message.transfer_id),
        }
        self.endpoint = Endpoint(server, handlers, self.report, self.ledger.peer_lost, lease_s=60, heartbeat_s=1)

    def open_pair(self, peer: bytes, message: PairOpen) -> None:
        self.pairs[peer] = ReceivingPair(
            peer, self.ledger, LAYOUT, PoolView(self.pool.layers()), lambda answer: self.endpoint.send(peer, answer), self.stats
        )
        self.pairs[peer].open(message, self.ref, self.transports, LEASE_S)

    def report(self) -> LoadReport:
        return LoadReport("decode-0", 5, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)

    def ticket(self, num_tokens: int, salt: str | None = None) -> tuple[Ticket, TicketEntry]:
        """Of a prompt that shares its beginning with those of the same salt, or with none."""
        salt = f"{time.monotonic_ns()}" if salt is None else salt
        entry = self.ledger.reserve(b"router", tuple(range(num_tokens)), 1, salt)
        assert entry is not None
        table = tuple(entry.block_table)
        ticket = Ticket(entry.ticket_id, entry.transfer_id, self.ref, BLOCK_SIZE, table, num_tokens, entry.held_tokens)
        return ticket, entry

    def content(self, entry: TicketEntry, num_tokens: int) -> torch.Tensor:
        data = self.pool.data[:, :, torch.tensor(entry.block_table)].flatten(2, 3)
        return data[:, :, :num_tokens].clone()


@dataclass
class World:
    decode: Decode
    source: KVPool
    transports: Sequence[SendTransport]

    async def pair(self, layout: KvLayout = LAYOUT, peer: WorkerRef | None = None) -> SendingPair:
        return await SendingPair.open(
            PREFILL,
            peer or self.decode.ref,
            SECRET,
            layout,
            self.transports,
            PoolView(self.source.layers()),
            connect_s=5,
            lease_s=LEASE_S,
            heartbeat_s=1,
        )


Kind = str | LoopbackNetwork


def sending(kind: Kind, source: KVPool) -> SendTransport:
    if isinstance(kind, LoopbackNetwork):
        return LoopbackTransport(kind)
    assert source.memory_fd is not None
    return {"gloo": GlooTransport("127.0.0.1"), "shared_memory": SharedMemorySender(source.memory_fd)}[kind]


def receiving(kind: Kind) -> ReceiveTransport:
    if isinstance(kind, LoopbackNetwork):
        return LoopbackTransport(kind)
    return {"gloo": GlooTransport("127.0.0.1"), "shared_memory": SharedMemoryReceiver()}[kind]


@asynccontextmanager
async def world(prefill: Sequence[Kind], decode: Sequence[Kind] | None = None) -> AsyncIterator[World]:
    """The transports that each side has; by default decode's are prefill's."""
    receiver = Decode([receiving(kind) for kind in (prefill if decode is None else decode)])
    source = pool()
    source.data.normal_(generator=torch.Generator().manual_seed(1))
    serving = asyncio.create_task(receiver.endpoint.run())
    try:
        async with asyncio.timeout(60):
            yield World(receiver, source, [sending(kind, source) for kind in prefill])
        receiver.ledger.check_integrity()
    finally:
        for pair in receiver.pairs.values():
            await pair.close()
        serving.cancel()
        await asyncio.wait((serving,))


def finished_step() -> StepSignal:
    signal = StepSignal()
    signal.finish()
    return signal


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


EVERY_TRANSPORT = pytest.mark.parametrize("kind", [LoopbackNetwork(), "gloo", "shared_memory"], ids=["loopback", "gloo", "shm"])
