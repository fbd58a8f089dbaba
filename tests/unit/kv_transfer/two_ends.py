"""Sender and receiver with a real ledger, a real pool on each side and real sockets, in one process, without engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from decode_workers.ledger import Ledger
from decode_workers.ticket_entry import TicketEntry
from engine.memory.kv_pool import KVPool
from engine.memory.prefix_cache import PrefixCache
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.receiver import ReceivingPair, TransferStats
from kv_transfer.sender import SendingPair
from kv_transfer.transport import ReceiveTransport, SendTransport
from kv_transfer.transports.gloo import GlooTransport, SealedGlooTransport
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackTransport
from kv_transfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from protocol.endpoint import Endpoint
from protocol.messages.handoff import PairOpen, PushAnnounce, PushCommit, TransferAbort
from protocol.messages.load import LoadReport
from protocol.messages.workers import KvLayout, Ticket, WorkerRef
from protocol.wire import WireServer
from tests.unit.load_reports import load_report

SECRET = b"k" * 32
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 3, 2, 8, 4, 16
LAYOUT = KvLayout("hash", "float32", "auto", LAYERS, HEADS, HEAD_DIM, 1, "cpu")
PREFILL = WorkerRef("prefill-0", 1, "tcp://127.0.0.1:1")
LEASE_S = 1.0
DONE = 0
"""A step that is over."""


def pool(num_heads: int = HEADS, block_size: int = BLOCK_SIZE) -> KVPool:
    return KVPool(
        num_layers=LAYERS,
        num_blocks=BLOCKS * BLOCK_SIZE // block_size,
        block_size=block_size,
        num_kv_heads=num_heads,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        shared=True,
    )


class Decode:
    """The receiving half of a decode worker: ledger, pairs and socket, without an engine."""

    def __init__(self, transports: Sequence[ReceiveTransport], pools: Sequence[KVPool]) -> None:
        """`pools`: one for each rank."""
        self.pools = pools
        self.pool = pools[0]
        self.block_size = self.pool.block_size
        for each in pools:
            each.data.zero_()
        self.blocks = PrefixCache(self.pool.num_blocks)
        self.committed: list[int] = []
        self.failed: list[int] = []
        self.ledger = Ledger(
            self.blocks,
            self.block_size,
            60.0,
            time.monotonic,
            on_committed=lambda entry: self.committed.append(entry.ticket_id),
            on_failed=lambda entry: self.failed.append(entry.ticket_id),
            on_settled=lambda: None,
        )
        self.stats = TransferStats()
        self.pairs: dict[bytes, ReceivingPair] = {}
        self.transports = transports
        server = WireServer(SECRET, "127.0.0.1")
        self.ref = WorkerRef("decode-0", 5, server.address, len(pools))
        self.handlers: dict[type[Any], Callable[[bytes, Any], None]] = {
            PairOpen: self.open_pair,
            PushAnnounce: lambda peer, message: self.pairs[peer].announce(message),
            PushCommit: lambda peer, message: self.pairs[peer].commit(message),
            TransferAbort: lambda peer, message: self.ledger.abort_transfer(message.ticket_id, message.transfer_id),
        }
        self.endpoint = Endpoint(server, lease_s=60, heartbeat_s=1)

    def open_pair(self, peer: bytes, message: PairOpen) -> None:
        if peer not in self.pairs or self.pairs[peer].closed:
            size = self.block_size
            ranks = [LocalReceiveRank(each.layers(), size, self.transports, LEASE_S) for each in self.pools]
            answer: Callable[[object], None] = lambda message: self.endpoint.send(peer, message)  # noqa: E731
            self.pairs[peer] = ReceivingPair(peer, self.ref, self.ledger, LAYOUT, size, ranks, answer, self.stats)
        self.pairs[peer].open(message)

    def report(self) -> LoadReport:
        return load_report("decode-0", epoch=5)

    def ticket(self, num_tokens: int, salt: str | None = None) -> tuple[Ticket, TicketEntry]:
        """Of a prompt that shares its beginning with those of the same salt, or with none."""
        salt = f"{time.monotonic_ns()}" if salt is None else salt
        entry = self.ledger.reserve(b"router", tuple(range(num_tokens)), 1, salt)
        assert entry is not None
        table = tuple(entry.block_table)
        ticket = Ticket(entry.ticket_id, entry.transfer_id, self.ref, self.block_size, table, num_tokens, entry.held_tokens)
        return ticket, entry

    def content(self, entry: TicketEntry, num_tokens: int) -> torch.Tensor:
        data = self.pool.data[:, :, torch.tensor(entry.block_table)].flatten(2, 3)
        return data[:, :, :num_tokens].clone()


@dataclass
class World:
    decode: Decode
    sources: Sequence[KVPool]
    """One for each rank of prefill."""
    transports: Sequence[SendTransport]
    """Of one rank; more ranks than one have gloo or loopback."""
    progress: StepProgress
    sent: list[int] = field(default_factory=list)
    """Bytes of KV that have left, push by push."""

    @property
    def source(self) -> KVPool:
        return self.sources[0]

    async def pair(self, layout: KvLayout = LAYOUT, peer: WorkerRef | None = None) -> SendingPair:
        return await SendingPair.open(
            replace(PREFILL, num_ranks=len(self.sources)),
            peer or self.decode.ref,
            SECRET,
            layout,
            [LocalSendRank(each.layers(), each.block_size, self.transports, self.progress, LEASE_S) for each in self.sources],
            head_bytes=self.source.head_bytes,
            on_sent=self.sent.append,
            connect_s=5,
            lease_s=LEASE_S,
            heartbeat_s=1,
        )


Kind = str | LoopbackNetwork


def sending(kind: Kind, source: KVPool) -> SendTransport:
    if isinstance(kind, LoopbackNetwork):
        return LoopbackTransport(kind)
    if kind in ("gloo", "gloo_encrypted"):
        return GlooTransport("127.0.0.1") if kind == "gloo" else SealedGlooTransport("127.0.0.1")
    assert kind == "shared_memory"
    assert source.memory_fd is not None
    return SharedMemorySender(source.memory_fd)


def receiving(kind: Kind) -> ReceiveTransport:
    if isinstance(kind, LoopbackNetwork):
        return LoopbackTransport(kind)
    if kind in ("gloo", "gloo_encrypted"):
        return GlooTransport("127.0.0.1") if kind == "gloo" else SealedGlooTransport("127.0.0.1")
    assert kind == "shared_memory"
    return SharedMemoryReceiver()


@asynccontextmanager
async def world(
    prefill: Sequence[Kind],
    decode: Sequence[Kind] | None = None,
    sources: Sequence[KVPool] = (),
    targets: Sequence[KVPool] = (),
) -> AsyncIterator[World]:
    """The transports that each side has, by default decode's are prefill's; the pools of each side's ranks, by default one."""
    receiver = Decode([receiving(kind) for kind in (prefill if decode is None else decode)], targets or [pool()])
    sources = sources or [pool()]
    for number, source in enumerate(sources):
        source.data.normal_(generator=torch.Generator().manual_seed(1 + number))
    serving = asyncio.create_task(receiver.endpoint.run(receiver.handlers, receiver.report, receiver.ledger.peer_lost))
    try:
        async with asyncio.timeout(60):
            yield World(receiver, sources, [sending(kind, sources[0]) for kind in prefill], StepProgress(torch.device("cpu")))
        receiver.ledger.check_integrity()
    finally:
        for pair in receiver.pairs.values():
            await pair.close()
        serving.cancel()
        await asyncio.wait((serving,))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


EVERY_TRANSPORT = pytest.mark.parametrize(
    "kind", [LoopbackNetwork(), "gloo", "gloo_encrypted", "shared_memory"], ids=["loopback", "gloo", "encrypted", "shm"]
)
