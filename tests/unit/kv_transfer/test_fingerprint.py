"""Fingerprints do not depend on where blocks lie, and any damage shows in the block that it is in: of both kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.arithmetic import ceil_div
from kv_transfer.fingerprints.pushes import DIGEST_BYTES, first_difference, push_fingerprints
from kv_transfer.plan import cut
from kv_transfer.pool_view import CpuPoolView, PoolView
from tests.cases import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton interprets
BLOCK_SIZE, ROW_BYTES, LAYERS, BLOCKS = 4, 8, 3, 12
TABLES = st.permutations(range(BLOCKS)).map(lambda table: table[:5])
# What a view can do decides how it is hashed: xxh3 wants bytes, the kernel takes tensors of any device.
FEWER = settings(max_examples=30)  # Triton's interpreter takes milliseconds for what a GPU does in microseconds
IDS = ["xxh3", "multilinear"]
BOTH_KINDS = pytest.mark.parametrize("kind", [CpuPoolView, PoolView], ids=IDS)
ONE_SLOW = pytest.mark.parametrize("kind", [CpuPoolView, *slow([PoolView])], ids=IDS)


def fingerprints(
    kind: type[PoolView],
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
    layers = torch.from_numpy(pool).to("cpu" if kind is CpuPoolView else DEVICE).unbind(0)
    view = kind(layers, None if head is None else range(head, head + 1))
    digests = b""
    for start, end in itertools.pairwise(borders):
        push = push_fingerprints(view, [cut(table, block_size, start, end - start, BLOCK_SIZE)])
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


@ONE_SLOW
@FEWER
@given(data=st.data(), mine=TABLES, theirs=TABLES, num_tokens=st.integers(1, 5 * BLOCK_SIZE))
def test_places_and_portions_of_layers_do_not_matter(
    kind: type[PoolView], data: st.DataObject, mine: list[int], theirs: list[int], num_tokens: int
) -> None:
    content = content_of(0, num_tokens)
    inner = data.draw(st.sets(st.integers(1, num_tokens)))
    borders = sorted({0, *inner, num_tokens})
    one = fingerprints(kind, content, mine, borders, [range(LAYERS)])
    other = fingerprints(kind, content, theirs, borders, [range(0, 2), range(2, 3)])
    assert one == other
    parts = sum(ceil_div(end, BLOCK_SIZE) - start // BLOCK_SIZE for start, end in itertools.pairwise(borders))
    assert len(one) == parts * DIGEST_BYTES
    assert first_difference(one, other) is None


@ONE_SLOW
@FEWER
@given(
    num_tokens=st.integers(1, 5 * BLOCK_SIZE), block_size=st.sampled_from([1, 2, 4, 8, 12]), head=st.sampled_from([None, 0, 2])
)
def test_block_sizes_and_other_heads_do_not_matter(
    kind: type[PoolView], num_tokens: int, block_size: int, head: int | None
) -> None:
    """Prefill takes its fingerprints in decode's blocks, of the heads that travel, wherever these lie."""
    content = content_of(4, num_tokens)
    table = list(range(BLOCKS * BLOCK_SIZE // block_size))[::-1]
    mine = fingerprints(kind, content, [3, 1, 0, 5, 7], [0, num_tokens], [range(LAYERS)])
    theirs = fingerprints(kind, content, table, [0, num_tokens], [range(0, 1), range(1, 3)], block_size, head)
    assert mine == theirs


@BOTH_KINDS
@FEWER
@given(data=st.data(), num_tokens=st.integers(1, 5 * BLOCK_SIZE), bit=st.integers(0, 7))
def test_a_flipped_bit_shows_in_its_block(kind: type[PoolView], data: st.DataObject, num_tokens: int, bit: int) -> None:
    content = content_of(1, num_tokens)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in content.shape)
    damaged = content.copy()
    damaged[place] ^= 1 << bit
    table = list(range(5))
    one, other = (fingerprints(kind, each, table, [0, num_tokens], [range(LAYERS)]) for each in (content, damaged))
    assert first_difference(one, other) == place[2] // BLOCK_SIZE
    assert sum(one[i : i + 8] != other[i : i + 8] for i in range(0, len(one), 8)) == 1


@ONE_SLOW
@FEWER
@given(swapped=st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True))
def test_two_swapped_blocks_show(kind: type[PoolView], swapped: list[int]) -> None:
    content = content_of(2, 5 * BLOCK_SIZE)
    table = list(range(5))
    wrong = list(table)
    for one, other in itertools.permutations(swapped):
        wrong[one] = table[other]
    blocks = content.reshape(LAYERS, 2, 5, BLOCK_SIZE, ROW_BYTES)[:, :, wrong].reshape(content.shape)
    mine, theirs = (fingerprints(kind, each, table, [0, 20], [range(LAYERS)]) for each in (content, blocks))
    assert first_difference(mine, theirs) == min(swapped)


@BOTH_KINDS
def test_a_block_too_few_shows(kind: type[PoolView]) -> None:
    whole = fingerprints(kind, content_of(3, 9), [0, 1, 2], [0, 9], [range(LAYERS)])
    assert first_difference(whole[:-DIGEST_BYTES], whole) == 2
    assert first_difference(whole[:-1], whole) == 2
    assert first_difference(b"", b"") is None


@ONE_SLOW
@FEWER
@example(places=[(0, 0, 0, 7), (0, 0, 1, 7)], bit=7)  # the highest of a 64-bit word, whose products with odd numbers cancel
@given(
    places=st.lists(
        st.tuples(*(st.integers(0, size - 1) for size in (LAYERS, 2, BLOCK_SIZE, ROW_BYTES))), min_size=2, unique=True
    ),
    bit=st.integers(0, 7),
)
def test_flips_of_equal_bits_do_not_make_up_for_each_other(
    kind: type[PoolView], places: list[tuple[int, int, int, int]], bit: int
) -> None:
    """Such as the signs of some values: the upper bits of words, where sums of products are weakest."""
    content = content_of(5, BLOCK_SIZE)
    damaged = content.copy()
    for place in places:
        damaged[place] ^= 1 << bit
    one, other = (fingerprints(kind, each, [0], [0, BLOCK_SIZE], [range(LAYERS)]) for each in (content, damaged))
    assert one != other


@ONE_SLOW
@FEWER
@given(data=st.data(), axis=st.integers(0, 3))
def test_what_changed_places_shows(kind: type[PoolView], data: st.DataObject, axis: int) -> None:
    """Two layers, K and V, two tokens of a block, two bytes of all rows."""
    content = content_of(6, BLOCK_SIZE)
    size = content.shape[axis]
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    order = list(range(size))
    order[one], order[other] = other, one
    swapped = content.take(order, axis)
    mine, theirs = (fingerprints(kind, each, [0], [0, BLOCK_SIZE], [range(LAYERS)]) for each in (content, swapped))
    assert mine != theirs


def test_several_transfers_share_a_push() -> None:
    """Each has the digests of its own blocks, the same as in a push of its own."""
    pool = torch.from_numpy(content_of(7, BLOCKS * BLOCK_SIZE)).unflatten(-1, (1, ROW_BYTES)).unbind(0)
    cuts = [cut([3, 1], BLOCK_SIZE, 0, 6, BLOCK_SIZE), cut([0, 5], BLOCK_SIZE, 2, 4, BLOCK_SIZE)]
    for view in (CpuPoolView(pool), PoolView(torch.stack(list(pool)).to(DEVICE).unbind(0))):
        together, *alone = (push_fingerprints(view, each) for each in (cuts, cuts[:1], cuts[1:]))
        for push in (together, *alone):
            push.update(range(LAYERS))
        assert together.digests() == [*alone[0].digests(), *alone[1].digests()]
        assert [len(each) for each in together.digests()] == [2 * DIGEST_BYTES] * 2


def test_multilinear_digests_stay_what_they_are() -> None:
    """Workers of different builds compare them."""
    content = np.arange(LAYERS * 2 * 6 * ROW_BYTES, dtype=np.uint8).reshape(LAYERS, 2, 6, ROW_BYTES)
    digests = fingerprints(PoolView, content, [2, 7], [0, 6], [range(LAYERS)])
    assert digests.hex() == "00b81537a2100a0a60abc9bdd4c92370"
