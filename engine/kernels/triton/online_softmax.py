"""What both attention kernels compute alike, to the bit: the sum over a part of a context, and the sum of parts.

    part      tiles of its tokens, in order, with a running maximum      Milakov and Gimelshein, 2018; FlashAttention-2, 2023
    context   its parts, in order, with a running maximum of their own   Flash-Decoding, 2023

Everything that could be rounded in two ways is written out: multiply-adds by name, and the total of a tile's weights as a
product with ones. A sum across a tile's columns would have the order of the threads that hold them, which is another one in
each kernel; matrix units take 16 inputs after the other, whatever the tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

MIN_DOT = 16
"""The least extent that a matrix product has in Triton."""
HEAD_DIMS = (16, 32, 64, 128)
"""Head sizes for which nothing is spilled."""
TILE_TOKENS = {2: 64, 4: 32}
"""Tokens of a tile by the bytes of a value. They are part of the arithmetic: a part's maximum moves from tile to tile."""

_ONES: tl.constexpr = tl.constexpr(MIN_DOT)


@dataclass(frozen=True)
class ProgramConfig:
    """Warps and pipeline stages of a program that goes over its context."""

    num_warps: int
    num_stages: int


def scale_log2(head_dim: int) -> float:
    """1/sqrt(H), for exponentials of base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, HEAD: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sum, the totals and the maximum of a part before its first tile. All columns of the totals are alike."""
    return (
        tl.zeros((ROWS, HEAD), tl.float32),
        tl.zeros((ROWS, _ONES), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
    )


@triton.jit
def attend_tiles(
    q_MH: tl.tensor,
    sum_MH: tl.tensor,
    totals_MX: tl.tensor,
    best_M: tl.tensor,
    limit_M: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    table_W: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    SLOT: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take in a part's tokens from `begin`, where a tile of it begins, to `end`; row m sees those before `limit_M[m]`.

    With a WINDOW it sees the last ones of them alone, and MASKED is true. A tile of which it sees nothing changes no bit of it.

    `k_SKH` and `v_SKH` point to the head in the pool's first slot; slots are SLOT elements apart. Without MASKED, `end - begin`
    is a multiple of TILE and every row sees everything. Keys and values in fp8 become of the queries' type.
    """
    dim_H = tl.arange(0, HEAD)
    for first in tl.range(begin, end, TILE):
        token_L = first + tl.arange(0, TILE)
        if MASKED:
            # Beyond the end the table and the pool may hold anything, NaN included.
            inside_L = token_L < end
            block_L = tl.load(table_W + token_L // BLOCK, mask=inside_L, other=0)
            slot_L = block_L.to(tl.int64) * BLOCK + token_L % BLOCK
            k_HL = tl.load(k_SKH + slot_L[None, :] * SLOT + dim_H[:, None], mask=inside_L[None, :], other=0.0).to(q_MH.dtype)
            v_LH = tl.load(v_SKH + slot_L[:, None] * SLOT + dim_H[None, :], mask=inside_L[:, None], other=0.0).to(q_MH.dtype)
            scores_ML = tl.dot(q_MH, k_HL, input_precision="ieee")
            scores_ML = tl.where(token_L[None, :] < limit_M[:, None], scores_ML, float("-inf"))
            if WINDOW > 0:
                scores_ML = tl.where(token_L[None, :] >= limit_M[:, None] - WINDOW, scores_ML, float("-inf"))
        else:
            block_L = tl.load(table_W + token_L // BLOCK)
            slot_L = block_L.to(tl.int64) * BLOCK + token_L % BLOCK
            k_HL = tl.load(k_SKH + slot_L[None, :] * SLOT + dim_H[:, None]).to(q_MH.dtype)
            v_LH = tl.load(v_SKH + slot_L[:, None] * SLOT + dim_H[None, :]).to(q_MH.dtype)
            scores_ML = tl.dot(q_MH, k_HL, input_precision="ieee")
        raised_M, from_M = _raised(best_M, tl.max(scores_ML, axis=1))
        shrink_M = tl.exp2((best_M - from_M) * SCALE)
        weights_ML = tl.exp2(_times_plus(scores_ML, SCALE, (from_M * -SCALE)[:, None])).to(v_LH.dtype)
        ones_LX = tl.full((TILE, _ONES), 1.0, v_LH.dtype)
        totals_MX = tl.dot(weights_ML, ones_LX, totals_MX * shrink_M[:, None], input_precision="ieee")
        sum_MH = tl.dot(weights_ML, v_LH, sum_MH * shrink_M[:, None], input_precision="ieee")
        best_M = raised_M
    return sum_MH, totals_MX, best_M


@triton.jit
def total_of(totals_MX: tl.tensor) -> tl.tensor:
    """Return the totals [M]: any one of the columns of `totals_MX`, which are all equal."""
    return tl.max(totals_MX, axis=1)


@triton.jit
def add_part(
    sum_MH: tl.tensor,
    total_M: tl.tensor,
    best_M: tl.tensor,
    part_sum_MH: tl.tensor,
    part_total_M: tl.tensor,
    part_best_M: tl.tensor,
    SCALE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sum, total and maximum of the parts so far, with one more. A row may have seen nothing of it, but of the first."""
    raised_M, from_M = _raised(best_M, part_best_M)
    shrink_M, weight_M = tl.exp2((best_M - from_M) * SCALE), tl.exp2((part_best_M - from_M) * SCALE)
    sum_MH = tl.fma(part_sum_MH, tl.broadcast_to(weight_M[:, None], part_sum_MH.shape), sum_MH * shrink_M[:, None])
    return sum_MH, tl.fma(part_total_M, weight_M, total_M * shrink_M), raised_M


@triton.jit
def _raised(best_M: tl.tensor, other_M: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The larger of two maxima, and what exponents are counted from then: it, or 0 where nothing was seen."""
    raised_M = tl.maximum(best_M, other_M)
    return raised_M, tl.where(raised_M == float("-inf"), 0.0, raised_M)


@triton.jit
def _times_plus(x: tl.tensor, scale: tl.constexpr, base: tl.tensor) -> tl.tensor:
    """`x * scale + base`, rounded once."""
    return tl.fma(x, tl.full(x.shape, scale, tl.float32), tl.broadcast_to(base, x.shape))


@triton.jit
def first_tile(begin: tl.tensor, limit: tl.tensor, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Where the first tile begins of a part from `begin` on of which something lies in the WINDOW before `limit`."""
    return tl.maximum(begin, tl.maximum(limit - WINDOW, 0) // TILE * TILE)
