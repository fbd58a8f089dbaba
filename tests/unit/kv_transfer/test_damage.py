"""What is damaged on the way, or in memory, is caught before the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from kv_transfer.lanes import _LocalReceiveLane
from kv_transfer.pool_view import CpuPoolView, PoolView, Slots
from kv_transfer.sender import OutgoingTransfer, PushPart, SendingPair
from kv_transfer.transport import ReceiveChannel, ReceiveTransport
from kv_transfer.transports.loopback import Faults, LoopbackNetwork
from kv_transfer.transports.staged import StagedSender
from protocol.errors import KvTransferError, TandemError
from protocol.gang import TokenSpan
from tests.unit.kv_transfer.two_ends import (
    BLOCK_SIZE,
    BLOCKS,
    DONE,
    HEAD_DIM,
    HEADS,
    until,
    world,
)


async def push_and_commit(pair: SendingPair, push: asyncio.Future[None], transfer: OutgoingTransfer) -> None:
    await push
    await pair.commit(transfer)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(flip_bit_at=0),
        Faults(truncate_at=0),
        Faults(swap_halves_at=0),
        Faults(swap_blocks_at=0, block_bytes=BLOCK_SIZE * HEADS * HEAD_DIM * 4),
        Faults(lose_at=0),
    ],
    ids=["bit flip", "truncation", "swapped halves", "swapped blocks", "lost payload"],
)
def test_damage_is_caught_before_the_commit(faults: Faults) -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        async with world([network]) as w:
            pair = await w.pair()
            network.faults = faults
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            push = pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)])
            with pytest.raises(TandemError):
                await push_and_commit(pair, push, transfer)
            await until(lambda: len(w.decode.ledger) == 0)
            assert w.decode.committed == []
            assert w.decode.failed == [ticket.ticket_id]
            assert w.decode.stats.failed == 1
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


Damage = Callable[[CpuPoolView, range, Slots], None]


class DamagedReceiver:
    """A real transport, and what bad memory or a peer that frees too early does to the blocks that it fills."""

    def __init__(self, real: ReceiveTransport, damage: Damage) -> None:
        self.name = real.name
        self._real = real
        self._damage = damage

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        channel = self._real.connect_receiver(offer, answer, pool, deadline_s)
        assert isinstance(pool, CpuPoolView)
        return DamagedChannel(channel, pool, self._damage)


@dataclass
class DamagedChannel:
    real: ReceiveChannel
    pool: CpuPoolView
    damage: Damage

    def receive(self, layers: range, slots: Slots) -> None:
        self.real.receive(layers, slots)
        self.damage(self.pool, layers, slots)

    def flush(self) -> None:
        self.real.flush()

    def interrupt(self) -> None:
        self.real.interrupt()

    def close(self) -> None:
        self.real.close()


def flip(pool: CpuPoolView, layers: range, slots: Slots) -> None:
    pool.rows[layers[-1]][1, slots.ids_T[-1], -1] ^= 1


def swap_blocks(pool: CpuPoolView, layers: range, slots: Slots) -> None:
    one, other = slots.ids_T[:BLOCK_SIZE].numpy(), slots.ids_T[BLOCK_SIZE : 2 * BLOCK_SIZE].numpy()
    for rows in pool.rows:
        rows[:, one], rows[:, other] = rows[:, other].copy(), rows[:, one].copy()


def leave_out_the_last_token(pool: CpuPoolView, layers: range, slots: Slots) -> None:
    for layer in layers:
        pool.rows[layer][:, slots.ids_T[-1]] = 0


@pytest.mark.parametrize("damage", [flip, swap_blocks, leave_out_the_last_token])
@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_damage_in_memory_is_caught_before_the_commit(kind: str, damage: Damage) -> None:
    async def scenario() -> None:
        async with world([kind]) as w:
            w.decode.transports = [DamagedReceiver(w.decode.transports[0], damage)]
            pair = await w.pair()
            ticket, _ = w.decode.ticket(11)
            transfer = OutgoingTransfer(ticket)
            await pair.push(DONE, [PushPart(transfer, [4, 1, 2], 0, 11)])
            with pytest.raises(KvTransferError, match=r"not the KV that was sent, from part [02] on"):
                await pair.commit(transfer)
            assert w.decode.committed == []
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), OverflowError("Max 2**31 - 1 bytes"), MemoryError()])
def test_a_sender_that_fails_in_a_way_that_no_transport_foresees_breaks_the_pair(error: Exception) -> None:
    """Whoever waits for a push on it hears that it has failed, also one that comes later."""

    def fail(*_: object) -> None:
        raise error

    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StagedSender, "send", fail)
                tickets = [w.decode.ticket(8)[0] for _ in range(2)]
                pushes = [pair.push(DONE, [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)]) for ticket in tickets]
                for push in (*pushes, pair.push(DONE, [])):
                    with pytest.raises(KvTransferError):
                        await asyncio.wait_for(push, 5)
            assert pair.broken
            assert pair.pushes_in_flight == 0
            await pair.close()
            await until(lambda: w.decode.blocks.num_free == BLOCKS)

    asyncio.run(scenario())


def run_out_of_memory(pool: CpuPoolView, layers: range, slots: Slots) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nSee documentation")


def test_a_gpu_without_memory_breaks_the_pair_and_frees_its_blocks() -> None:
    async def scenario() -> None:
        async with world(["shared_memory"]) as w:
            w.decode.transports = [DamagedReceiver(w.decode.transports[0], run_out_of_memory)]
            pair = await w.pair()
            ticket, _ = w.decode.ticket(11)
            transfer = OutgoingTransfer(ticket)
            with pytest.raises(KvTransferError):
                await push_and_commit(pair, pair.push(DONE, [PushPart(transfer, [4, 1, 2], 0, 11)]), transfer)
            [receiver] = w.decode.pairs.values()
            await until(lambda: receiver.closed)
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_pair_whose_receiver_lacks_memory_behind_the_last_byte_is_broken_at_its_sender(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is due on the lanes any more by which the sender could find out."""

    async def scenario() -> None:
        async with world([transport]) as w:
            pair = await w.pair()
            receive = _LocalReceiveLane._receive

            def lacking(lane: _LocalReceiveLane, spans: Sequence[TokenSpan]) -> list[bytes]:
                receive(lane, spans)
                raise MemoryError("no memory for the digests")

            monkeypatch.setattr(_LocalReceiveLane, "_receive", lacking)
            transfer = OutgoingTransfer(w.decode.ticket(8)[0])
            with pytest.raises(KvTransferError):
                await push_and_commit(pair, pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)]), transfer)
            await until(lambda: pair.broken)
            await until(lambda: w.decode.blocks.num_free == BLOCKS)
            await pair.close()

    asyncio.run(scenario())


def test_a_push_to_a_pair_that_is_closed_breaks_it_at_its_sender() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            [receiver] = w.decode.pairs.values()
            await receiver.close()
            transfer = OutgoingTransfer(w.decode.ticket(8)[0])
            with pytest.raises(KvTransferError):
                await push_and_commit(pair, pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)]), transfer)
            assert pair.broken
            await pair.close()

    asyncio.run(scenario())


def test_a_lane_whose_thread_finds_no_memory_on_the_gpu_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(view: CpuPoolView) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def scenario() -> None:
        async with world(["shared_memory"]) as w:
            with monkeypatch.context() as patch:
                patch.setattr(CpuPoolView, "begin_thread", lacking)
                with pytest.raises(TandemError):
                    await w.pair()
            await (await w.pair()).close()

    asyncio.run(scenario())
