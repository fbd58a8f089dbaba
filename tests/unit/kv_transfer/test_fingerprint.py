"""Fingerprints do not depend on where blocks lie, and any damage shows in the block that it is in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.fingerprint import DIGEST_BYTES, PushFingerprints, first_difference
from kv_transfer.plan import cut
from kv_transfer.pool_view import PoolView

BLOCK_SIZE, ROW_BYTES, LAYERS, BLOCKS = 4, 8, 3, 12
TABLES = st.permutations(range(BLOCKS)).map(lambda table: table[:5])


def fingerprints(
    content: np.ndarray,
    table: Sequence[int],
    borders: Sequence[int],
    groups: Sequence[range],
    block_size: int = BLOCK_SIZE,
    head: int | None = None,
) -> bytes:
    """Of `content`, uint8 [layers, 2, tokens, row], laid into a pool by this table and pushed between these borders.

    With a `head`, it is the rows of that one of three heads that the pool has.
    """
    heads = 1 if head is None else 3
    pool = np.zeros((LAYERS, 2, BLOCKS * BLOCK_SIZE, heads, ROW_BYTES), dtype=np.uint8)
    for slots, token in slots_of(table, block_size, content.shape[2]):
        pool[:, :, slots, head or 0] = content[:, :, token : token + slots.stop - slots.start]
    view = PoolView(torch.from_numpy(pool).unbind(0), None if head is None else range(head, head + 1))
    digests = b""
    for start, end in itertools.pairwise(borders):
        push = PushFingerprints(view, [cut(table, block_size, start, end - start, BLOCK_SIZE)])
        for group in groups:
            push.update(group)
        digests += push.digests()[0]
    return digests


def slots_of(table: Sequence[int], block_size: int, num_tokens: int) -> Iterator[tuple[slice, int]]:
    """Where the tokens of each block lie, and the first of them."""
    for number, token in enumerate(range(0, num_tokens, block_size)):
        count = min(block_size, num_tokens - token)
        yield slice(table[number] * block_size, table[number] * block_size + count), token


def content_of(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, 2, num_tokens, ROW_BYTES), dtype=np.uint8)


@given(data=st.data(), mine=TABLES, theirs=TABLES, num_tokens=st.integers(1, 5 * BLOCK_SIZE))
def test_places_and_portions_of_layers_do_not_matter(
    data: st.DataObject, mine: list[int], theirs: list[int], num_tokens: int
) -> None:
    content = content_of(0, num_tokens)
    inner = data.draw(st.sets(st.integers(1, num_tokens)))
    borders = sorted({0, *inner, num_tokens})
    one = fingerprints(content, mine, borders, [range(LAYERS)])
    other = fingerprints(content, theirs, borders, [range(0, 2), range(2, 3)])
    assert one == other
    parts = sum(-(-end // BLOCK_SIZE) - start // BLOCK_SIZE for start, end in itertools.pairwise(borders))
    assert len(one) == parts * DIGEST_BYTES
    assert first_difference(one, other) is None


@given(
    num_tokens=st.integers(1, 5 * BLOCK_SIZE), block_size=st.sampled_from([1, 2, 4, 8, 12]), head=st.sampled_from([None, 0, 2])
)
def test_block_sizes_and_other_heads_do_not_matter(num_tokens: int, block_size: int, head: int | None) -> None:
    """Prefill takes its fingerprints in decode's blocks, of the heads that travel, wherever these lie."""
    content = content_of(4, num_tokens)
    table = list(range(BLOCKS * BLOCK_SIZE // block_size))[::-1]
    mine = fingerprints(content, [3, 1, 0, 5, 7], [0, num_tokens], [range(LAYERS)])
    theirs = fingerprints(content, table, [0, num_tokens], [range(0, 1), range(1, 3)], block_size, head)
    assert mine == theirs


@given(data=st.data(), num_tokens=st.integers(1, 5 * BLOCK_SIZE), bit=st.integers(0, 7))
def test_a_flipped_bit_shows_in_its_block(data: st.DataObject, num_tokens: int, bit: int) -> None:
    content = content_of(1, num_tokens)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in content.shape)
    damaged = content.copy()
    damaged[place] ^= 1 << bit
    table = list(range(5))
    one, other = (fingerprints(each, table, [0, num_tokens], [range(LAYERS)]) for each in (content, damaged))
    assert first_difference(one, other) == place[2] // BLOCK_SIZE
    assert sum(one[i : i + 8] != other[i : i + 8] for i in range(0, len(one), 8)) == 1


@given(swapped=st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True))
def test_two_swapped_blocks_show(swapped: list[int]) -> None:
    content = content_of(2, 5 * BLOCK_SIZE)
    table = list(range(5))
    wrong = list(table)
    for one, other in itertools.permutations(swapped):
        wrong[one] = table[other]
    blocks = content.reshape(LAYERS, 2, 5, BLOCK_SIZE, ROW_BYTES)[:, :, wrong].reshape(content.shape)
    mine, theirs = (fingerprints(each, table, [0, 20], [range(LAYERS)]) for each in (content, blocks))
    assert first_difference(mine, theirs) == min(swapped)


def test_a_block_too_few_shows() -> None:
    whole = fingerprints(content_of(3, 9), [0, 1, 2], [0, 9], [range(LAYERS)])
    assert first_difference(whole[:-DIGEST_BYTES], whole) == 2
    assert first_difference(whole[:-1], whole) == 2
    assert first_difference(b"", b"") is None
