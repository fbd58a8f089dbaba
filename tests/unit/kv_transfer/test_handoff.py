"""Tokens arrive exactly, and blocks come back, whatever becomes of a transfer."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kv_transfer.pool_view import Slots
from kv_transfer.sender import OutgoingTransfer, PushPart
from kv_transfer.transports.loopback import Faults, LoopbackNetwork
from protocol.errors import KvTransferError
from protocol.ticket import TicketState
from tests.unit.kv_transfer.two_ends import (
    BLOCKS,
    DONE,
    EVERY_TRANSPORT,
    LAYERS,
    Kind,
    until,
    world,
)


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
            first = w.progress.begin()
            pushes = [pair.push(first, [PushPart(long, long_table, 0, 7)])]
            pushes.append(pair.push(DONE, [PushPart(long, long_table, 7, 4), PushPart(short, short_table, 0, 6)]))
            for layer in range(LAYERS):
                await asyncio.sleep(0.02)
                assert not pushes[0].done(), "nothing ends before the step does"
                w.progress.layer_done(layer)
            w.progress.finish()
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


@pytest.mark.parametrize("mixed", [False, True])
def test_kv_of_another_arithmetic_is_cached_for_nobody_however_it_came_to_its_sender(mixed: bool) -> None:
    """The sender computes as the receiver does, but some of what it sends it got from a worker that does not."""

    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            ticket, entry = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket, mixed=mixed)
            for start in (0, 4):
                await pair.push(DONE, [PushPart(transfer, [1, 2], start, 4)])
            await pair.commit(transfer)
            assert entry.mixed is mixed
            assert w.decode.blocks.num_cached == (0 if mixed else 2)
            await pair.close()

    asyncio.run(scenario())


@EVERY_TRANSPORT
def test_a_commit_does_not_wait_for_the_next_prompt(kind: Kind) -> None:
    """The next push is announced when its step begins, and ends with it: nobody's second token waits for that."""

    async def scenario() -> None:
        async with world([kind]) as w:
            pair = await w.pair()
            ticket, entry = w.decode.ticket(8)
            next_ticket, next_entry = w.decode.ticket(8)
            transfer, next_transfer = OutgoingTransfer(ticket), OutgoingTransfer(next_ticket)
            push = pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)])
            await push
            next_push = pair.push(w.progress.begin(), [PushPart(next_transfer, [3, 4], 0, 8)])
            await until(lambda: next_entry.pushes_in_flight == 1)
            await pair.commit(transfer)
            assert entry.state is TicketState.COMMITTED
            assert not next_push.done()
            w.progress.finish()
            await next_push
            await pair.commit(next_transfer)
            assert w.decode.committed == [ticket.ticket_id, next_ticket.ticket_id]
            await pair.close()

    asyncio.run(scenario())


def test_death_of_the_sender_in_the_middle_of_a_push() -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        network.faults = Faults(die_at=0)
        async with world([network]) as w:
            pair = await w.pair()
            ticket, _ = w.decode.ticket(8)
            push = pair.push(DONE, [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            with pytest.raises(KvTransferError):
                await push
            assert pair.broken
            with pytest.raises(KvTransferError):
                await pair.push(DONE, [])
            await until(lambda: len(w.decode.ledger) == 0)
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()
            again = await w.pair()
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            await again.push(DONE, [PushPart(transfer, [1, 2], 0, 8)])
            await again.commit(transfer)
            assert w.decode.committed == [ticket.ticket_id], "a new epoch of the pair works"
            await again.close()

    asyncio.run(scenario())


def test_blocks_of_a_cancelled_ticket_stay_quarantined_until_its_push_ends() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            ticket, entry = w.decode.ticket(8)
            step = w.progress.begin()
            push = pair.push(step, [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            await until(lambda: entry.pushes_in_flight == 1)
            w.decode.ledger.release(ticket.ticket_id)
            assert entry.state is TicketState.ABORTED
            assert w.decode.blocks.num_free == BLOCKS - 2, "the push may still write into them"
            w.progress.finish()
            await push
            await until(lambda: w.decode.blocks.num_free == BLOCKS)
            await pair.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_pair_that_is_closed_while_it_breaks_gives_its_channel_back() -> None:
    async def scenario() -> None:
        async with world(["shared_memory"]) as w:
            pair = await w.pair()
            [receiver] = w.decode.pairs.values()
            ticket, _ = w.decode.ticket(8)
            push = pair.push(w.progress.begin(), [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            await until(lambda: any(entry.pushes_in_flight for entry in w.decode.ledger))
            lane = receiver._lanes[0]
            pair._lanes[0]._channel.close()  # type: ignore[attr-defined]
            while not receiver.closed:  # noqa: ASYNC110 - the moment between its thread's end and its own
                await asyncio.sleep(0)
            await asyncio.gather(receiver.close(), receiver.close())
            with pytest.raises(AssertionError, match="closed"):
                lane._channel.receive(range(1), Slots([]))  # type: ignore[attr-defined]
            assert w.decode.blocks.num_free == BLOCKS
            with pytest.raises(KvTransferError):
                await push
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
            await pair.push(DONE, [PushPart(gone, [1], 0, 4), PushPart(good, [2], 0, 4)])
            with pytest.raises(KvTransferError, match="no longer holds"):
                await pair.commit(gone)
            await pair.commit(good)
            assert w.decode.committed == [ticket.ticket_id]
            await pair.close()

    asyncio.run(scenario())


def test_what_is_queued_of_an_aborted_transfer_is_not_sent() -> None:
    """But for what decode has posted already. Pushes end in order, and those of others go on."""

    async def scenario() -> None:
        network = LoopbackNetwork()
        async with world([network]) as w:
            pair = await w.pair()
            ticket, _ = w.decode.ticket(40)
            next_ticket, _ = w.decode.ticket(8)
            transfer, next_transfer = OutgoingTransfer(ticket), OutgoingTransfer(next_ticket)
            network.faults = Faults(delay_s=0.05)
            pushes = [pair.push(DONE, [PushPart(transfer, range(10), start, 4)]) for start in range(0, 40, 4)]
            last = pair.push(DONE, [PushPart(next_transfer, [1, 2], 0, 8)])
            await until(lambda: network.payloads_sent == 1)
            pair.abort(transfer)
            await last
            assert all(push.done() for push in pushes)
            assert network.payloads_sent <= 1 + 3
            with pytest.raises(KvTransferError, match="no longer holds"):
                await pair.commit(transfer)
            await pair.commit(next_transfer)
            assert w.decode.committed == [next_ticket.ticket_id]
            assert pair.pushes_in_flight == 0
            await pair.close()

    asyncio.run(scenario())


def test_an_incomplete_transfer_is_not_committed() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()]) as w:
            pair = await w.pair()
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            await pair.push(DONE, [PushPart(transfer, [1, 2], 0, 4)])
            with pytest.raises(KvTransferError, match="incomplete"):
                await pair.commit(transfer)
            assert w.decode.committed == []
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())


@EVERY_TRANSPORT
def test_many_transfers_in_a_row_change_nothing(kind: Kind) -> None:
    async def scenario() -> None:
        async with world([kind]) as w:
            pair = await w.pair()
            for number in range(300):
                ticket, _ = w.decode.ticket(1 + number % 16)
                transfer = OutgoingTransfer(ticket)
                await pair.push(DONE, [PushPart(transfer, [3, 1, 4, 0], 0, ticket.num_prompt_tokens)])
                await pair.commit(transfer)
                w.decode.ledger.release(ticket.ticket_id)
            assert w.decode.stats.committed == 300
            assert w.decode.blocks.num_free == BLOCKS
            await pair.close()

    asyncio.run(scenario())
