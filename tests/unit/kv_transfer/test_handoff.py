"""Sender and receiver with a real ledger, a real pool on each side and real sockets; over loopback with faults, and gloo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from decode_workers.ledger import Ledger, TicketEntry
from engine.block_manager import BlockManager
from engine.kv_pool import KVPool
from kv_transfer.gloo import GlooTransport
from kv_transfer.loopback import Faults, LoopbackNetwork, LoopbackTransport
from kv_transfer.pool_view import PoolView
from kv_transfer.receiver import ReceivingPair, TransferStats
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair, StepSignal
from kv_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.endpoint import Endpoint
from protocol.errors import IncompatiblePeerError, KvTransferError, TandemError, WorkerLostError
from protocol.messages import KvLayout, LoadReport, PairOpen, PushAnnounce, PushCommit, Role, Ticket, TransferAbort, WorkerRef
from protocol.ticket import TicketState
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
        self.blocks = BlockManager(BLOCKS)
        self.committed: list[int] = []
        self.failed: list[int] = []
        self.ledger = Ledger(
            self.blocks,
            BLOCK_SIZE,
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
        return LoadReport("decode-0", 5, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)

    def ticket(self, num_tokens: int) -> tuple[Ticket, TicketEntry]:
        entry = self.ledger.reserve(b"router", tuple(range(num_tokens)), 1)
        assert entry is not None
        table = tuple(entry.block_table)
        return Ticket(entry.ticket_id, entry.transfer_id, self.ref, BLOCK_SIZE, table, num_tokens), entry

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


async def push_and_commit(pair: SendingPair, push: asyncio.Future[None], transfer: OutgoingTransfer) -> None:
    await push
    await pair.commit(transfer)


EVERY_TRANSPORT = pytest.mark.parametrize("kind", [LoopbackNetwork(), "gloo", "shared_memory"], ids=["loopback", "gloo", "shm"])


@EVERY_TRANSPORT
def test_two_interleaved_prompts_arrive_exactly(kind: Kind) -> None:
    """Two prompts in shuffled blocks, cut into chunks that share pushes, and layers that come one by one."""

    async def scenario() -> None:
        async with world([kind]) as w:
            pair = await w.pair()
            long_ticket, long_entry = w.decode.ticket(11)
            short_ticket, short_entry = w.decode.ticket(6)
            long, short = OutgoingTransfer(long_ticket), OutgoingTransfer(short_ticket)
            long_table, short_table = [9, 2, 14], [7, 0]
            first = StepSignal()
            pushes = [pair.push(first, [PushPart(long, long_table, 0, 7)])]
            pushes.append(pair.push(finished_step(), [PushPart(long, long_table, 7, 4), PushPart(short, short_table, 0, 6)]))
            for layer in range(LAYERS):
                await asyncio.sleep(0.02)
                assert not pushes[0].done(), "nothing ends before the step does"
                first.layer_done(layer)
            first.finish()
            await asyncio.gather(*pushes)
            await pair.commit(long)
            await pair.commit(short)
            assert w.decode.committed == [long_ticket.ticket_id, short_ticket.ticket_id]
            for table, entry, count in ((long_table, long_entry, 11), (short_table, short_entry, 6)):
                sent = w.source.data[:, :, torch.tensor(table)].flatten(2, 3)[:, :, :count]
                assert torch.equal(w.decode.content(entry, count), sent)
            assert w.decode.stats.committed == 2
            await pair.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "faults",
    [Faults(flip_bit_at=0), Faults(truncate_at=0), Faults(swap_halves_at=0), Faults(lose_at=0)],
    ids=["bit flip", "truncation", "swapped halves", "lost payload"],
)
def test_damage_is_caught_before_the_commit(faults: Faults) -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        async with world([network]) as w:
            pair = await w.pair()
            network.faults = faults
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            push = pair.push(finished_step(), [PushPart(transfer, [1, 2], 0, 8)])
            with pytest.raises(TandemError):
                await push_and_commit(pair, push, transfer)
            await until(lambda: len(w.decode.ledger) == 0)
            assert w.decode.committed == []
            assert w.decode.failed == [ticket.ticket_id]
            assert w.decode.stats.failed == 1
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


def test_death_of_the_sender_in_the_middle_of_a_push() -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        network.faults = Faults(die_at=0)
        async with world([network]) as w:
            pair = await w.pair()
            ticket, _ = w.decode.ticket(8)
            push = pair.push(finished_step(), [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            with pytest.raises(KvTransferError):
                await push
            assert pair.broken
            with pytest.raises(KvTransferError):
                await pair.push(finished_step(), [])
            await until(lambda: len(w.decode.ledger) == 0)
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()
            again = await w.pair()
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            await again.push(finished_step(), [PushPart(transfer, [1, 2], 0, 8)])
            await again.commit(transfer)
            assert w.decode.committed == [ticket.ticket_id], "a new epoch of the pair works"
            await again.close()

    asyncio.run(scenario())


def test_blocks_of_a_cancelled_ticket_stay_quarantined_until_its_push_ends() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            ticket, entry = w.decode.ticket(8)
            signal = StepSignal()
            push = pair.push(signal, [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            await until(lambda: entry.pushes_in_flight == 1)
            w.decode.ledger.release(ticket.ticket_id)
            assert entry.state is TicketState.ABORTED
            assert w.decode.blocks.num_free == BLOCKS - 2, "the push may still write into them"
            signal.finish()
            await push
            await until(lambda: w.decode.blocks.num_free == BLOCKS)
            await pair.close()

    asyncio.run(scenario())


def test_a_ticket_that_is_gone_is_refused_and_the_others_go_on() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            gone_ticket, _ = w.decode.ticket(4)
            ticket, _ = w.decode.ticket(4)
            gone, good = OutgoingTransfer(gone_ticket), OutgoingTransfer(ticket)
            w.decode.ledger.release(gone_ticket.ticket_id)
            await pair.push(finished_step(), [PushPart(gone, [1], 0, 4), PushPart(good, [2], 0, 4)])
            with pytest.raises(KvTransferError, match="no longer holds"):
                await pair.commit(gone)
            await pair.commit(good)
            assert w.decode.committed == [ticket.ticket_id]
            await pair.close()

    asyncio.run(scenario())


def test_an_incomplete_transfer_is_not_committed() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            await pair.push(finished_step(), [PushPart(transfer, [1, 2], 0, 4)])
            with pytest.raises(KvTransferError, match="incomplete"):
                await pair.commit(transfer)
            assert w.decode.committed == []
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


@EVERY_TRANSPORT
def test_what_does_not_fit_together_is_refused_by_name(kind: Kind) -> None:
    async def scenario() -> None:
        async with world([kind]) as w:
            with pytest.raises(IncompatiblePeerError, match="dtype: float32 here, bfloat16 there; block_size: 4 here, 8 there"):
                await w.pair(replace(LAYOUT, dtype="bfloat16", block_size=8))
            with pytest.raises(WorkerLostError, match="epoch 5, not 4"):
                await w.pair(peer=replace(w.decode.ref, epoch=4))

    asyncio.run(scenario())


@EVERY_TRANSPORT
def test_many_transfers_in_a_row_change_nothing(kind: Kind) -> None:
    async def scenario() -> None:
        async with world([kind]) as w:
            pair = await w.pair()
            for number in range(300):
                ticket, _ = w.decode.ticket(1 + number % 16)
                transfer = OutgoingTransfer(ticket)
                await pair.push(finished_step(), [PushPart(transfer, [3, 1, 4, 0], 0, ticket.num_prompt_tokens)])
                await pair.commit(transfer)
                w.decode.ledger.release(ticket.ticket_id)
            assert w.decode.stats.committed == 300
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())
