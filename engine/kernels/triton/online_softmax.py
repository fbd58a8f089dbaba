"""What both attention kernels repeat: one tile of the context after the other, with a running maximum and total.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; as tiles: Dao, "FlashAttention-2", 2023.
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


@dataclass(frozen=True)
class TileConfig:
    """How a program goes over its context."""

    tokens: int
    """Taken in at once."""
    num_warps: int
    num_stages: int


def scale_log2(head_dim: int) -> float:
    """1/sqrt(H), for exponentials of base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


@triton.jit
def attend_tiles(
    q_MH: tl.tensor,
    sum_MH: tl.tensor,
    total_M: tl.tensor,
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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take in the tokens from `begin` to `end`, of which row m sees those before `limit_M[m]`.

    `k_SKH` and `v_SKH` point to the head in the pool's first slot; slots are SLOT elements apart. A row that has seen nothing
    before sees at least one token of the first tile. Without MASKED, `end - begin` is a multiple of TILE and every row
    sees everything.
    """
    dim_H = tl.arange(0, HEAD)
    for first in tl.range(begin, end, TILE):
        token_L = first + tl.arange(0, TILE)
        if MASKED:
            # Beyond the end the table and the pool may hold anything, NaN included.
            inside_L = token_L < end
            block_L = tl.load(table_W + token_L // BLOCK, mask=inside_L, other=0)
            slot_L = block_L.to(tl.int64) * BLOCK + token_L % BLOCK
            k_HL = tl.load(k_SKH + slot_L[None, :] * SLOT + dim_H[:, None], mask=inside_L[None, :], other=0.0)
            v_LH = tl.load(v_SKH + slot_L[:, None] * SLOT + dim_H[None, :], mask=inside_L[:, None], other=0.0)
            scores_ML = tl.dot(q_MH, k_HL, input_precision="ieee") * SCALE
            scores_ML = tl.where(token_L[None, :] < limit_M[:, None], scores_ML, float("-inf"))
        else:
            block_L = tl.load(table_W + token_L // BLOCK)
            slot_L = block_L.to(tl.int64) * BLOCK + token_L % BLOCK
            k_HL = tl.load(k_SKH + slot_L[None, :] * SLOT + dim_H[:, None])
            v_LH = tl.load(v_SKH + slot_L[:, None] * SLOT + dim_H[None, :])
            scores_ML = tl.dot(q_MH, k_HL, input_precision="ieee") * SCALE
        new_best_M = tl.maximum(best_M, tl.max(scores_ML, axis=1))
        weights_ML = tl.exp2(scores_ML - new_best_M[:, None])
        shrink_M = tl.exp2(best_M - new_best_M)
        total_M = total_M * shrink_M + tl.sum(weights_ML, axis=1)
        sum_MH = tl.dot(weights_ML.to(v_LH.dtype), v_LH, sum_MH * shrink_M[:, None], input_precision="ieee")
        best_M = new_best_M
    return sum_MH, total_M, best_M
