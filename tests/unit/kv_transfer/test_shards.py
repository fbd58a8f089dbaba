"""Any number of prefill ranks to any number of decode ranks gives each decode rank just what a dense pool would."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.sharding import heads_of
from kv_transfer.shards import head_moves, token_moves
from protocol.errors import IncompatiblePeerError

LAYERS, HEAD_DIM = 2, 3
RANKS = st.sampled_from([1, 2, 4, 8])
HEADS = st.sampled_from([1, 2, 3, 4, 6, 8])


def even(ranks: int, heads: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


@given(ranks=RANKS, heads=HEADS)
def test_ranks_hold_every_head_equally_often(ranks: int, heads: int) -> None:
    if not even(ranks, heads):
        with pytest.raises(IncompatiblePeerError, match=f"{heads} KV heads .* {ranks} ranks"):
            heads_of(0, ranks, heads)
        return
    held = [head for rank in range(ranks) for head in heads_of(rank, ranks, heads)]
    assert held == sorted(held), "neighbours hold neighbours"
    assert {held.count(head) for head in range(heads)} == {max(1, ranks // heads)}


@given(prefill=RANKS, decode=RANKS, heads=HEADS)
def test_every_decode_rank_gets_each_of_its_heads_once(prefill: int, decode: int, heads: int) -> None:
    if not (even(prefill, heads) and even(decode, heads)):
        return
    moves = head_moves(prefill, decode, heads)
    for rank in range(decode):
        got = []
        for move in (move for move in moves if move.decode_rank == rank):
            source = heads_of(move.prefill_rank, prefill, heads)[move.source_head : move.source_head + move.num_heads]
            destination = heads_of(rank, decode, heads)[move.destination_head : move.destination_head + move.num_heads]
            assert source == destination
            assert len(source) == move.num_heads
            got += list(destination)
        assert got == list(heads_of(rank, decode, heads))
    pairs = [(move.prefill_rank, move.decode_rank) for move in moves]
    assert len(pairs) == len(set(pairs)), "one move per pair of ranks"
    if decode % prefill == 0 or prefill <= heads:
        assert {move.prefill_rank for move in moves} == set(range(prefill)), "nobody is idle while another does its work"


def paged(dense_L2TKH: torch.Tensor, heads: range, table: list[int], block: int) -> torch.Tensor:
    """One rank's pool that holds these heads of a sequence: [layers, 2, slots, heads, head dim]."""
    pool = torch.full((LAYERS, 2, 40 * block, len(heads), HEAD_DIM), -1.0)
    for token in range(dense_L2TKH.shape[2]):
        pool[:, :, table[token // block] * block + token % block] = dense_L2TKH[:, :, token, heads.start : heads.stop]
    return pool


def hand_over(prefill: int, decode: int, heads: int, blocks: tuple[int, int], count: int, borders: list[int]) -> None:
    """A whole transfer in pushes between these borders, against the dense pool that it should become."""
    generator = torch.Generator().manual_seed(count)
    dense = torch.randn(LAYERS, 2, count, heads, HEAD_DIM, generator=generator)
    tables = [torch.randperm(40, generator=generator).tolist()[: -(-count // block)] for block in blocks]
    sources = [paged(dense, heads_of(rank, prefill, heads), tables[0], blocks[0]) for rank in range(prefill)]
    empty = torch.zeros(LAYERS, 2, 0, heads, HEAD_DIM)
    targets = [paged(empty, heads_of(rank, decode, heads), tables[1], blocks[1]) for rank in range(decode)]
    for start, end in itertools.pairwise(borders):
        for copy in token_moves(tables[0], blocks[0], tables[1], blocks[1], start, end - start):
            for move in head_moves(prefill, decode, heads):
                targets[move.decode_rank][
                    :,
                    :,
                    copy.destination : copy.destination + copy.length,
                    move.destination_head : move.destination_head + move.num_heads,
                ] = sources[move.prefill_rank][
                    :,
                    :,
                    copy.source : copy.source + copy.length,
                    move.source_head : move.source_head + move.num_heads,
                ]
    for rank, target in enumerate(targets):
        assert torch.equal(target, paged(dense, heads_of(rank, decode, heads), tables[1], blocks[1]))


@pytest.mark.parametrize("prefill", [1, 2, 4])
@pytest.mark.parametrize("decode", [1, 2, 4])
def test_all_pairs_with_two_heads_give_the_dense_result(prefill: int, decode: int) -> None:
    hand_over(prefill, decode, 2, (8, 8), 37, [0, 16, 32, 37])


@settings(max_examples=60)
@given(
    data=st.data(),
    prefill=st.sampled_from([1, 2, 4]),
    decode=st.sampled_from([1, 2, 4]),
    heads=st.sampled_from([1, 2, 4, 8]),
    blocks=st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16])),
    count=st.integers(1, 60),
)
def test_any_plan_gives_the_dense_result(
    data: st.DataObject, prefill: int, decode: int, heads: int, blocks: tuple[int, int], count: int
) -> None:
    borders = sorted({0, *data.draw(st.sets(st.integers(1, count))), count})
    hand_over(prefill, decode, heads, blocks, count, borders)
