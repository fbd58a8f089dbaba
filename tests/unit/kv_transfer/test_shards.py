"""Any number of prefill ranks to any number of decode ranks: each decode rank gets its heads, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sharding import heads_of
from kv_transfer.shards import head_moves
from protocol.errors import IncompatiblePeerError

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


@pytest.mark.parametrize("ranks", [-(2**63), -1, 0, 1025, 2**62])
def test_numbers_of_ranks_that_nobody_has_are_refused(ranks: int) -> None:
    for sizes in ((ranks, 1), (1, ranks)):
        with pytest.raises(IncompatiblePeerError, match="1 to 1024 ranks"):
            head_moves(*sizes, num_kv_heads=2)
