"""Fingerprints do not depend on where blocks lie, and any damage shows in the block that it is in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.fingerprint import DIGEST_BYTES, BlockFingerprints, first_difference
from kv_transfer.plan import cut

BLOCK_SIZE, ROW_BYTES, LAYERS, BLOCKS = 4, 8, 3, 12
TABLES = st.permutations(range(BLOCKS)).map(lambda table: table[:5])


def fingerprints(content: np.ndarray, table: Sequence[int], borders: Sequence[int], groups: Sequence[range]) -> bytes:
    """Of `content`, uint8 [layers, 2, tokens, row], laid into a pool by this table and pushed between these borders."""
    pool = np.zeros((LAYERS, 2, BLOCKS * BLOCK_SIZE, ROW_BYTES), dtype=np.uint8)
    for piece in cut(table, BLOCK_SIZE, 0, content.shape[2]):
        token = piece.block * BLOCK_SIZE
        pool[:, :, piece.slot : piece.slot + piece.length] = content[:, :, token : token + piece.length]
    layers = [layer.data.cast("B") for layer in pool]
    result = BlockFingerprints()
    for start, end in itertools.pairwise(borders):
        for group in groups:
            result.update([layers[i] for i in group], ROW_BYTES, cut(table, BLOCK_SIZE, start, end - start))
    return result.digest()


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
    assert len(one) == -(-num_tokens // BLOCK_SIZE) * DIGEST_BYTES
    assert first_difference(one, other) is None


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
