"""Portions cover every layer once, pieces every token once and in its slot, and copies put each token where it belongs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import MIN_MESSAGE_BYTES, Piece, copies, cut, layer_groups, slot_runs


@given(num_layers=st.integers(1, 200), layer_bytes=st.integers(1, 4 * MIN_MESSAGE_BYTES))
def test_groups_cover_the_layers_in_order(num_layers: int, layer_bytes: int) -> None:
    groups = layer_groups(num_layers, layer_bytes)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert all(len(group) * layer_bytes >= MIN_MESSAGE_BYTES for group in groups[:-1])
    assert all((len(group) - 1) * layer_bytes < MIN_MESSAGE_BYTES for group in groups), "no larger than needed"


@given(num_layers=st.integers(1, 200), layer_bytes=st.integers(1, 4 * MIN_MESSAGE_BYTES), most=st.integers(1, 10))
def test_groups_may_have_a_limit(num_layers: int, layer_bytes: int, most: int) -> None:
    groups = layer_groups(num_layers, layer_bytes, most_messages=most)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert len(groups) <= most
    assert len(groups) <= len(layer_groups(num_layers, layer_bytes))


def slots(pieces: list[Piece]) -> list[int]:
    return [piece.slot + offset for piece in pieces for offset in range(piece.length)]


BLOCK_SIZES = st.sampled_from([1, 4, 8, 16])
TABLES = st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True)


@given(data=st.data(), block_size=BLOCK_SIZES, table=TABLES)
def test_pieces_follow_the_block_table(data: st.DataObject, block_size: int, table: list[int]) -> None:
    start = data.draw(st.integers(0, len(table) * block_size - 1))
    count = data.draw(st.integers(1, len(table) * block_size - start))
    every = [block * block_size + offset for block in table for offset in range(block_size)]
    digest_size = data.draw(BLOCK_SIZES)
    pieces = cut(table, block_size, start, count, digest_size)
    assert slots(pieces) == every[start : start + count]
    assert all(piece.slot // block_size == (piece.slot + piece.length - 1) // block_size for piece in pieces)
    digests = [piece.digest for piece in pieces for _ in range(piece.length)]
    assert digests == [position // digest_size for position in range(start, start + count)]


@given(data=st.data(), source_table=TABLES, source_block=BLOCK_SIZES, table=TABLES, block=BLOCK_SIZES)
def test_copies_put_each_token_where_it_belongs(
    data: st.DataObject, source_table: list[int], source_block: int, table: list[int], block: int
) -> None:
    """Also between pools of different block sizes."""
    count = data.draw(st.integers(1, min(len(source_table) * source_block, len(table) * block)))
    source, destination = (cut(each, size, 0, count, block) for each, size in ((source_table, source_block), (table, block)))
    source_runs, destination_runs = slot_runs(source), slot_runs(destination)
    for runs in (source_runs, destination_runs):
        assert all(sum(one) != other.start for one, other in itertools.pairwise(runs)), "no fewer would do"
    moves = [
        (copy.source + offset, copy.destination + offset)
        for copy in copies(source_runs, destination_runs)
        for offset in range(copy.length)
    ]
    assert moves == list(zip(slots(source), slots(destination), strict=True))
