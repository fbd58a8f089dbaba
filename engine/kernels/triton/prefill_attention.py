"""Causal attention of prompts' chunks to themselves and to what the pool holds of their earlier tokens.

All chunks of a step go into one launch. A tile is a run of a chunk's tokens. The query heads of a group are rows of their own,
so that keys and values are read once per group. A tile reads its chunk's context, its own tokens included, from the pool.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import context_parts
from engine.kernels.triton.context_parts import part_bounds, parts_of
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.online_softmax import (
    TILE_TOKENS,
    ProgramConfig,
    add_part,
    attend_tiles,
    first_tile,
    nothing_seen,
    scale_log2,
    total_of,
)

_Ints = npt.NDArray[np.int64]


_ROWS = 128
_TWO_BYTES = ProgramConfig(num_warps=8, num_stages=3)
"""Two groups of four warps, each with 64 rows: what Hopper's matrix instructions want."""
_FLOAT32_ROWS = 16
_FLOAT32 = ProgramConfig(num_warps=8, num_stages=2)
"""Float32 is multiplied outside of the matrix units, and both factors are held in registers."""


@triton.jit
def _with_part(
    sum_MH: tl.tensor,
    total_M: tl.tensor,
    best_M: tl.tensor,
    q_MH: tl.tensor,
    limit_M: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    table_W: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sum, total and maximum of the parts so far, with that from `begin` to `end`.

    Where its length is known when it is compiled, a loop is a tenth faster. A PIECE cuts a part whose length is not.
    """
    HEAD: tl.constexpr = q_MH.shape[1]
    own_MH, all_MX, top_M = nothing_seen(q_MH.shape[0], HEAD)
    if PIECE == 0:
        own_MH, all_MX, top_M = attend_tiles(
            q_MH,
            own_MH,
            all_MX,
            top_M,
            limit_M,
            k_SKH,
            v_SKH,
            table_W,
            begin,
            end,
            SLOT,
            HEAD,
            BLOCK,
            TILE,
            SCALE,
            MASKED,
            WINDOW,
        )
    else:
        for first in tl.range(begin, end, PIECE, num_stages=1):
            to = first + PIECE
            own_MH, all_MX, top_M = attend_tiles(
                q_MH,
                own_MH,
                all_MX,
                top_M,
                limit_M,
                k_SKH,
                v_SKH,
                table_W,
                first,
                to,
                SLOT,
                HEAD,
                BLOCK,
                TILE,
                SCALE,
                MASKED,
                WINDOW,
            )
    sum_MH, total_M, best_M = add_part(sum_MH, total_M, best_M, own_MH, total_of(all_MX), top_M, SCALE)
    return sum_MH, total_M, best_M


@triton.jit(do_not_specialize=["table_width"])
def _prefill_kernel(
    qkv_TA: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    tables_CW: tl.tensor,
    tiles_P4: tl.tensor,
    out_TNH: tl.tensor,
    table_width: tl.tensor,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST: tl.constexpr,
    DOUBLED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """One tile and key/value head."""
    kv_head, tile_4 = tl.program_id(0), tiles_P4 + tl.program_id(1) * 4
    row = tl.load(tile_4).to(tl.int64)
    num_tokens = tl.load(tile_4 + 1)
    position = tl.load(tile_4 + 2)
    table_W = tables_CW + tl.load(tile_4 + 3).to(tl.int64) * table_width
    row_M, dim_H = tl.arange(0, ROWS), tl.arange(0, HEAD)
    token_M = row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    used_M = token_M < num_tokens
    q_at_MH = ((row + token_M) * WIDTH + head_M * HEAD)[:, None] + dim_H[None, :]
    q_MH = tl.load(qkv_TA + q_at_MH, mask=used_M[:, None], other=0.0)
    limit_M = position + token_M + 1
    k_SKH += kv_head * HEAD
    v_SKH += kv_head * HEAD
    sum_MH, total_M = tl.zeros((ROWS, HEAD), tl.float32), tl.zeros((ROWS,), tl.float32)
    best_M = tl.full((ROWS,), float("-inf"), tl.float32)
    SLOT: tl.constexpr = KV_HEADS * HEAD
    end = position + num_tokens
    # What the first token sees, all see: whole parts of it need no mask, where there is no window.
    masked = parts_of(position + 2, FIRST, DOUBLED) - 1
    whole = masked
    if WINDOW > 0:
        masked = parts_of(tl.maximum(position + 1 - WINDOW, 0) + 1, FIRST, DOUBLED) - 1
        whole *= 0
    short = tl.minimum(whole, 2 * DOUBLED)
    for begin in tl.range(0, short * FIRST, FIRST, num_stages=1):
        to = begin + FIRST
        sum_MH, total_M, best_M = _with_part(
            sum_MH, total_M, best_M, q_MH, limit_M, k_SKH, v_SKH, table_W, begin, to, SLOT, BLOCK, TILE, SCALE, 0, False, 0
        )
    for part in tl.range(short, whole, num_stages=1):
        begin, to = part_bounds(part, FIRST, DOUBLED)
        sum_MH, total_M, best_M = _with_part(
            sum_MH, total_M, best_M, q_MH, limit_M, k_SKH, v_SKH, table_W, begin, to, SLOT, BLOCK, TILE, SCALE, FIRST, False, 0
        )
    for part in tl.range(masked, parts_of(end, FIRST, DOUBLED), num_stages=1):
        begin, to = part_bounds(part, FIRST, DOUBLED)
        if WINDOW > 0:
            begin = first_tile(begin, position + 1, WINDOW, TILE)
        to = tl.minimum(to, end)
        sum_MH, total_M, best_M = _with_part(
            sum_MH, total_M, best_M, q_MH, limit_M, k_SKH, v_SKH, table_W, begin, to, SLOT, BLOCK, TILE, SCALE, 0, True, WINDOW
        )
    out_at_MH = ((row + token_M) * (KV_HEADS * GROUP) + head_M)[:, None] * HEAD + dim_H[None, :]
    tl.store(out_TNH + out_at_MH, (sum_MH / total_M[:, None]).to(out_TNH.dtype.element_ty), mask=used_M[:, None])


def prefill_tiles(starts_C: _Ints, ends_C: _Ints, rows_C: _Ints, group: int, dtype: torch.dtype) -> _Ints:
    """The tiles [P, 4] of chunks that hold positions `starts` to `ends` of their sequences in rows from `rows` on.

    Each is its first row, its number of tokens, the position of the first, and its chunk. Those that see the most come first,
    so that none of them is left when all others are done.
    """
    size = tile_rows(dtype) // group
    assert size > 0, "the query heads of a group fit into a tile"
    tiles = [
        (row + first, min(size, end - start - first), start + first, chunk)
        for chunk, (start, end, row) in enumerate(zip(starts_C.tolist(), ends_C.tolist(), rows_C.tolist(), strict=True))
        for first in range(0, end - start, size)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return np.array(tiles, dtype=np.int64).reshape(-1, 4)


def tile_rows(dtype: torch.dtype) -> int:
    """Tokens of a tile, times query heads of a group."""
    return _FLOAT32_ROWS if dtype == torch.float32 else _ROWS


def prefill_attention(
    qkv_TA: Tensor,
    slots_2SKH: Tensor,
    tables_CW: Tensor,
    tiles_P4: Tensor,
    block_size: int,
    out_TNH: Tensor,
    window: int = 0,
) -> Launch:
    """Fill the rows of the tiles. Rows of `qkv_TA` start with their rotated query heads; their keys and values are in the pool.

    With a `window` a token sees no more than that many, itself and those before it. `tiles_P4` is what `prefill_tiles` makes
    for this dtype; `tables_CW` has the blocks of each chunk's context.
    """
    num_heads, head_dim = out_TNH.shape[1:]
    num_kv_heads = slots_2SKH.shape[2]
    config = _FLOAT32 if qkv_TA.dtype == torch.float32 else _TWO_BYTES
    return Launch(
        _prefill_kernel,
        (num_kv_heads, len(tiles_P4)),
        (qkv_TA, slots_2SKH[0], slots_2SKH[1], tables_CW, tiles_P4, out_TNH, tables_CW.shape[1]),
        {
            "WIDTH": qkv_TA.shape[1],
            "KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "HEAD": head_dim,
            "BLOCK": block_size,
            "TILE": TILE_TOKENS[qkv_TA.dtype.itemsize],
            "ROWS": tile_rows(qkv_TA.dtype),
            "SCALE": scale_log2(head_dim),
            "FIRST": context_parts.FIRST_TOKENS,
            "DOUBLED": context_parts.DOUBLED_AFTER,
            "WINDOW": window,
        },
        config.num_warps,
        config.num_stages,
    )
