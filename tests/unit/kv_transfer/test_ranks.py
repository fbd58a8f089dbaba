"""Workers with several ranks, and pools of other block sizes: every decode rank gets just what a dense pool would give it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.sharding import heads_of
from engine.memory.kv_pool import KVPool
from kv_transfer.sender import OutgoingTransfer, PushPart
from kv_transfer.transports.loopback import Faults, LoopbackNetwork
from protocol.errors import IncompatiblePeerError, KvTransferError
from tests.unit.kv_transfer.two_ends import BLOCK_SIZE, DONE, HEAD_DIM, HEADS, LAYERS, Kind, World, pool, world

RANKS = [1, 2, 4]


def pools(num_ranks: int, block_size: int = BLOCK_SIZE) -> list[KVPool]:
    return [pool(len(heads_of(rank, num_ranks, HEADS)), block_size) for rank in range(num_ranks)]


def write(dense_L2TKH: torch.Tensor, ranks: Sequence[KVPool], table: Sequence[int]) -> None:
    for rank, each in enumerate(ranks):
        heads = heads_of(rank, len(ranks), HEADS)
        for token in range(dense_L2TKH.shape[2]):
            block, offset = divmod(token, each.block_size)
            each.data[:, :, table[block], offset] = dense_L2TKH[:, :, token, heads.start : heads.stop]


def read(ranks: Sequence[KVPool], rank: int, table: Sequence[int], num_tokens: int) -> torch.Tensor:
    return ranks[rank].data[:, :, torch.tensor(table)].flatten(2, 3)[:, :, :num_tokens]


async def hand_over(w: World, dense: torch.Tensor, table: Sequence[int], borders: Sequence[int]) -> None:
    """A whole transfer in pushes between these borders; afterwards every rank of decode holds its heads of it."""
    write(dense, w.sources, table)
    pair = await w.pair()
    ticket, entry = w.decode.ticket(dense.shape[2])
    transfer = OutgoingTransfer(ticket)
    for start, end in itertools.pairwise(borders):
        await pair.push(DONE, [PushPart(transfer, table, start, end - start)])
    await pair.commit(transfer)
    assert sum(w.sent) == dense.nbytes * max(1, len(w.decode.pools) // HEADS), "ranks that share a head get one each"
    w.sent.clear()
    for rank in range(len(w.decode.pools)):
        heads = heads_of(rank, len(w.decode.pools), HEADS)
        got = read(w.decode.pools, rank, entry.block_table, dense.shape[2])
        assert torch.equal(got, dense[:, :, :, heads.start : heads.stop])
    await pair.close()


def dense_of(num_tokens: int) -> torch.Tensor:
    return torch.randn(LAYERS, 2, num_tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("decode", RANKS)
@pytest.mark.parametrize("prefill", RANKS)
@pytest.mark.parametrize("kind", ["gloo", "loopback"])
def test_all_pairs_with_two_heads_give_the_dense_result(kind: str, prefill: int, decode: int) -> None:
    async def scenario() -> None:
        transport: Kind = LoopbackNetwork() if kind == "loopback" else kind
        async with world([transport], sources=pools(prefill), targets=pools(decode)) as w:
            await hand_over(w, dense_of(37), [9, 2, 14, 0, 5, 7, 1, 3, 12, 4], [0, 16, 30, 37])

    asyncio.run(scenario())


@settings(max_examples=40)
@given(
    data=st.data(),
    prefill=st.sampled_from(RANKS),
    decode=st.sampled_from(RANKS),
    blocks=st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 8])),
    num_tokens=st.integers(1, 60),
)
def test_any_block_sizes_and_pushes_give_the_dense_result(
    data: st.DataObject, prefill: int, decode: int, blocks: tuple[int, int], num_tokens: int
) -> None:
    borders = sorted({0, *data.draw(st.sets(st.integers(1, num_tokens), max_size=5)), num_tokens})
    table = data.draw(st.permutations(range(64 // blocks[0])))

    async def scenario() -> None:
        sources, targets = pools(prefill, blocks[0]), pools(decode, blocks[1])
        async with world([LoopbackNetwork()], sources=sources, targets=targets) as w:
            await hand_over(w, dense_of(num_tokens), table, borders)

    asyncio.run(scenario())


def test_shared_memory_gives_some_of_the_heads() -> None:
    """One rank that holds both heads, to two that hold one each."""

    async def scenario() -> None:
        async with world(["shared_memory"], targets=pools(2, 8)) as w:
            await hand_over(w, dense_of(29), [9, 2, 14, 0, 5, 7, 1, 3], [0, 11, 29])

    asyncio.run(scenario())


@pytest.mark.parametrize("lane", range(4))
def test_damage_on_one_lane_is_caught(lane: int) -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        async with world([network], sources=pools(4), targets=pools(4)) as w:
            pair = await w.pair()
            network.faults = Faults(flip_bit_at=network.payloads_sent + lane)
            ticket, _ = w.decode.ticket(8)
            transfer = OutgoingTransfer(ticket)
            await pair.push(DONE, [PushPart(transfer, [1, 2], 0, 8)])
            with pytest.raises(KvTransferError, match=r"from part [01] on .lane \d."):
                await pair.commit(transfer)
            assert w.decode.blocks.num_free == w.decode.blocks.num_blocks
            await pair.close()

    asyncio.run(scenario())


def test_a_lane_that_breaks_ends_the_pair_and_frees_everything() -> None:
    async def scenario() -> None:
        network = LoopbackNetwork()
        async with world([network], sources=pools(2), targets=pools(4)) as w:
            pair = await w.pair()
            network.faults = Faults(die_at=network.payloads_sent + 2)
            ticket, entry = w.decode.ticket(8)
            with pytest.raises(KvTransferError):
                await pair.push(DONE, [PushPart(OutgoingTransfer(ticket), [1, 2], 0, 8)])
            assert pair.broken
            await pair.close()
            [receiver] = w.decode.pairs.values()
            await receiver.close()
            assert entry.state.final
            assert w.decode.blocks.num_free == w.decode.blocks.num_blocks
            network.faults = Faults()
            await hand_over(w, dense_of(9), [3, 1, 2], [0, 9])

    asyncio.run(scenario())


def test_ranks_that_can_not_share_the_heads_are_refused() -> None:
    async def scenario() -> None:
        async with world([LoopbackNetwork()], sources=[pool(1) for _ in range(3)]) as w:
            with pytest.raises(IncompatiblePeerError, match="2 KV heads can't be shared out evenly to 3 ranks"):
                await w.pair()

    asyncio.run(scenario())
