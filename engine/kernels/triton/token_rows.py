"""Tokens' keys and values as rows of bytes: copied between KV pools and dense buffers, and hashed where they lie.

What is copied or hashed is a `Rows`: L layers, each with 2 halves (K and V) of S slots, one slot behind the other. A row is
what is looked at of a slot: all of it, or the bytes of some heads. A launch covers consecutive layers.

Shape suffixes: T tokens, N blocks of a push, G halves, W 32-bit words of a row. Slots are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.kernels.triton.launch import Launch, power_of_two

_COPIED_TOKENS = 8
_MAX_COPIED_WORDS = 512
_HASHED_TOKENS = 8
_MAX_HASHED_WORDS = 256


@dataclass(frozen=True)
class Rows:
    """Rows of all layers, as 32-bit words."""

    first: Tensor
    """Points to the row in slot 0 of the first layer's K."""
    num_slots: int
    slot_words: int
    """Words from the row of one slot to that of the next slot."""
    row_words: int

    @classmethod
    def of(cls, layers: Sequence[Tensor]) -> Rows:
        """Views [2, S, heads, head size] of layers that lie one behind the other, as those of a KV pool do, or some heads of
        them."""
        first = layers[0]
        _, num_slots, heads, head_dim = first.shape
        size = first.element_size()
        slot_bytes, row_bytes = first.stride(1) * size, heads * head_dim * size
        assert slot_bytes % 4 == 0, "slots of whole words"
        assert row_bytes % 4 == 0, "rows of whole words"
        assert first.stride(2) == head_dim, "heads side by side"
        half_bytes = num_slots * slot_bytes
        assert first.stride(0) * size == half_bytes, "halves one behind the other"
        places = [layer.data_ptr() for layer in layers]
        assert all(at - places[0] == 2 * i * half_bytes for i, at in enumerate(places)), "layers one behind the other"
        return cls(first.flatten(2)[:1].view(torch.int32), num_slots, slot_bytes // 4, row_bytes // 4)


@triton.jit(do_not_specialize=["source_half", "target_half", "source_slots", "target_slots", "num_tokens"])
def _copy_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_T: tl.tensor,
    target_T: tl.tensor,
    source_half: tl.tensor,
    target_half: tl.tensor,
    source_slots: tl.tensor,
    target_slots: tl.tensor,
    num_tokens: tl.tensor,
    SOURCE_SLOT: tl.constexpr,
    TARGET_SLOT: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATHERED: tl.constexpr,
    SCATTERED: tl.constexpr,
) -> None:
    """Some tokens of one half."""
    half = tl.program_id(1).to(tl.int64)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside_T = token_T < num_tokens
    from_T, to_T = token_T.to(tl.int64), token_T.to(tl.int64)
    if GATHERED:
        from_T = tl.load(source_T + token_T, mask=inside_T, other=0)
    if SCATTERED:
        to_T = tl.load(target_T + token_T, mask=inside_T, other=0)
    from_T = (source_half + half) * source_slots + from_T
    to_T = (target_half + half) * target_slots + to_T
    for first in range(0, ROW, COLUMNS):
        column_W = first + tl.arange(0, COLUMNS)
        inside_TW = inside_T[:, None] & (column_W < ROW)[None, :]
        words_TW = tl.load(source + (from_T * SOURCE_SLOT)[:, None] + column_W[None, :], mask=inside_TW)
        tl.store(target + (to_T * TARGET_SLOT)[:, None] + column_W[None, :], words_TW, mask=inside_TW)


@triton.jit(do_not_specialize=["first_half", "num_slots", "num_blocks"])
def _hash_kernel(
    rows: tl.tensor,
    slots_T: tl.tensor,
    begins_N: tl.tensor,
    columns_W: tl.tensor,
    places_T: tl.tensor,
    hashes_GN: tl.tensor,
    first_half: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    SLOT: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One block in one half."""
    block, half = tl.program_id(0), (first_half + tl.program_id(1)).to(tl.int64)
    begin, end = tl.load(begins_N + block), tl.load(begins_N + block + 1)
    hash_T = tl.zeros((TOKENS,), tl.int64)
    for first in range(begin, end, TOKENS):
        token_T = first + tl.arange(0, TOKENS)
        inside_T = token_T < end
        slot_T = half * num_slots + tl.load(slots_T + token_T, mask=inside_T, other=0)
        row_T = tl.zeros((TOKENS,), tl.int64)
        for column in range(0, ROW, COLUMNS):
            column_W = column + tl.arange(0, COLUMNS)
            inside_W = column_W < ROW
            inside_TW = inside_T[:, None] & inside_W[None, :]
            words_TW = tl.load(rows + (slot_T * SLOT)[:, None] + column_W[None, :], mask=inside_TW, other=0).to(tl.int64)
            row_T += tl.sum(words_TW * tl.load(columns_W + column_W, mask=inside_W, other=0)[None, :], axis=1)
        hash_T += row_T * tl.load(places_T + token_T - begin, mask=inside_T, other=0)
    tl.store(hashes_GN + half * num_blocks + block, tl.sum(hash_T, axis=0))


def copy_rows(
    source: Rows, target: Rows, layers: tuple[int, int], num_layers: int, slots: tuple[Tensor | None, Tensor | None], count: int
) -> Launch:
    """Copy `count` tokens of `num_layers` layers, from the first of `layers` on in the source and the second in the target.

    `slots` [T] are those of the source and of the target; None means the first ones in order. Target slots are distinct. A
    count of 0 copies nothing, but compiles.
    """
    assert source.row_words == target.row_words, "rows of one layout"
    sources_T, targets_T = slots
    some = sources_T if sources_T is not None else targets_T
    assert some is not None, "one side has slots"
    return Launch(
        _copy_kernel,
        (max(ceil_div(count, _COPIED_TOKENS), 1), 2 * num_layers),
        (
            *(source.first, target.first, some if sources_T is None else sources_T, some if targets_T is None else targets_T),
            *(2 * layers[0], 2 * layers[1], source.num_slots, target.num_slots, count),
        ),
        {
            "SOURCE_SLOT": source.slot_words,
            "TARGET_SLOT": target.slot_words,
            "ROW": source.row_words,
            "COLUMNS": min(power_of_two(source.row_words), _MAX_COPIED_WORDS),
            "TOKENS": _COPIED_TOKENS,
            "GATHERED": sources_T is not None,
            "SCATTERED": targets_T is not None,
        },
        num_warps=4,
    )


def hash_rows(
    rows: Rows, layers: range, slots_T: Tensor, begins_N: Tensor, columns_W: Tensor, places_T: Tensor, hashes_GN: Tensor
) -> Launch:
    """Fill the halves of `layers` in the int64 `hashes_GN` [2 L, N] with one hash for each block, modulo 2^64.

    A row's hash is the sum of its words, each times the multiplier of its column. A block's hash is the sum of its rows'
    hashes, each times the multiplier of its place in the block. The tokens of block n are those from `begins_N[n]` to
    `begins_N[n + 1]`, int64 [N + 1]. Multipliers are int64.
    """
    num_blocks = hashes_GN.shape[1]
    return Launch(
        _hash_kernel,
        (num_blocks, 2 * len(layers)),
        (
            *(rows.first, slots_T, begins_N, columns_W, places_T, hashes_GN),
            *(2 * layers.start, rows.num_slots, num_blocks),
        ),
        {
            "SLOT": rows.slot_words,
            "ROW": rows.row_words,
            "COLUMNS": min(power_of_two(rows.row_words), _MAX_HASHED_WORDS),
            "TOKENS": _HASHED_TOKENS,
        },
        num_warps=4,
    )
