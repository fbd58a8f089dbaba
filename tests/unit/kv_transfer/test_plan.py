"""Portions cover every layer once, and slots are those of the block table."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import MIN_MESSAGE_BYTES, layer_groups, slot_ids


@given(num_layers=st.integers(1, 200), layer_bytes=st.integers(1, 4 * MIN_MESSAGE_BYTES))
def test_groups_cover_the_layers_in_order(num_layers: int, layer_bytes: int) -> None:
    groups = layer_groups(num_layers, layer_bytes)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert all(len(group) * layer_bytes >= MIN_MESSAGE_BYTES for group in groups[:-1])
    assert all((len(group) - 1) * layer_bytes < MIN_MESSAGE_BYTES for group in groups), "no larger than needed"


@given(data=st.data(), block_size=st.sampled_from([1, 8, 16]), table=st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_slots_follow_the_block_table(data: st.DataObject, block_size: int, table: list[int]) -> None:
    start = data.draw(st.integers(0, len(table) * block_size - 1))
    count = data.draw(st.integers(1, len(table) * block_size - start))
    every = [block * block_size + offset for block in table for offset in range(block_size)]
    assert slot_ids(table, block_size, start, count).tolist() == every[start : start + count]
