"""Attention of one new token per sequence to its whole context in the pool.

The query heads of a group are the rows of one matrix product, so keys and values are read once per group. A context is computed
in parts, whose sums a last kernel joins: few long sequences then fill the GPU too (Flash-Decoding, Dao et al., 2023). Where its
parts begin depends on the length of the context alone, so a token's bits do not depend on the sequences beside it.

    plan, once a step ──► parts of all contexts, one behind the other ──► each program takes one after the other ──► join

What there is to do is thus shared evenly among programs, as many as keep an H200 busy. A launch depends on the number of rows
alone: lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import Launch, power_of_two
from engine.kernels.triton.online_softmax import HEAD_DIMS, MIN_DOT, TileConfig, attend_tiles, scale_log2

MAX_PARTS = 64
"""Of one context. Where parts of `_PART` tokens would be more, they are twice as long, or four times."""
_PART = 256
"""Tokens. Parts of 512 read a twentieth faster where many long contexts fill the GPU, and take half as long again where one
context is all there is."""
_PLANNED = 128
"""Rows that the first kernel looks at at once."""
_JOINED = 16
"""Parts that the last kernel takes at once."""
_PROGRAMS = 8 * 132
"""Programs that keep an H200 busy: its 132 multiprocessors, several times."""
_TWO_BYTES = TileConfig(tokens=64, num_warps=2, num_stages=2)
"""Small, so that many programs fit on a multiprocessor: some wait for memory while others compute."""
_FLOAT32 = TileConfig(tokens=32, num_warps=8, num_stages=3)


@triton.jit
def part_tokens(length: tl.tensor, PART: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """Tokens of each part of a context but the last."""
    part = tl.full((), PART, tl.int32)
    while part * PARTS < length:
        part *= 2
    return part


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    lengths_R: tl.tensor,
    parts_I: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One row's parts, each as row * PARTS + part, behind those of the rows before it. The last row's program counts all."""
    row = tl.program_id(0)
    first = tl.full((), 1, tl.int32)
    for begin in range(0, row, ROWS):
        before_R = begin + tl.arange(0, ROWS)
        lengths_before_R = tl.load(lengths_R + before_R, mask=before_R < row, other=0)
        tokens_R = tl.full((ROWS,), PART, tl.int32)
        while tl.max(lengths_before_R - tokens_R * PARTS, axis=0) > 0:
            tokens_R = tl.where(tokens_R * PARTS < lengths_before_R, 2 * tokens_R, tokens_R)
        first += tl.sum(tl.cdiv(lengths_before_R, tokens_R), axis=0)
    length = tl.load(lengths_R + row)
    count = tl.cdiv(length, part_tokens(length, PART, PARTS))
    part_Z = tl.arange(0, PARTS)
    tl.store(parts_I + first + part_Z, row * PARTS + part_Z, mask=part_Z < count)
    if row == num_rows - 1:
        tl.store(parts_I, first + count - 1)


@triton.jit(do_not_specialize=["table_width"])
def _decode_kernel(
    q_RA: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    tables_RW: tl.tensor,
    lengths_R: tl.tensor,
    parts_I: tl.tensor,
    out_RNH: tl.tensor,
    sums_RNZH: tl.tensor,
    log_totals_RNZ: tl.tensor,
    table_width: tl.tensor,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """Some parts of some contexts, each for one key/value head."""
    group_M, dim_H = tl.arange(0, ROWS), tl.arange(0, HEAD)
    used_M = group_M < GROUP
    for item in range(tl.program_id(0), tl.load(parts_I) * KV_HEADS, tl.num_programs(0)):
        kv_head, place = item % KV_HEADS, tl.load(parts_I + 1 + item // KV_HEADS)
        row, split = (place // PARTS).to(tl.int64), place % PARTS
        length = tl.load(lengths_R + row)
        part = part_tokens(length, PART, PARTS)
        begin = split * part
        head_M = kv_head * GROUP + group_M
        q_MH = tl.load(q_RA + row * WIDTH + head_M[:, None] * HEAD + dim_H[None, :], mask=used_M[:, None], other=0.0)
        sum_MH, total_M, best_M = attend_tiles(
            q_MH,
            tl.zeros((ROWS, HEAD), tl.float32),
            tl.zeros((ROWS,), tl.float32),
            tl.full((ROWS,), float("-inf"), tl.float32),
            tl.zeros((ROWS,), tl.int32) + length,
            k_SKH + kv_head * HEAD,
            v_SKH + kv_head * HEAD,
            tables_RW + row * table_width,
            begin,
            tl.minimum(begin + part, length),
            KV_HEADS * HEAD,
            HEAD,
            BLOCK,
            TILE,
            SCALE,
            True,
        )
        head_at_M = row * (KV_HEADS * GROUP) + head_M
        mean_MH = sum_MH / total_M[:, None]
        if part >= length:
            out_at_MH = head_at_M[:, None] * HEAD + dim_H[None, :]
            tl.store(out_RNH + out_at_MH, mean_MH.to(out_RNH.dtype.element_ty), mask=used_M[:, None])
        else:
            split_at_M = head_at_M * PARTS + split
            tl.store(sums_RNZH + split_at_M[:, None] * HEAD + dim_H[None, :], mean_MH, mask=used_M[:, None])
            tl.store(log_totals_RNZ + split_at_M, best_M + tl.log2(total_M), mask=used_M)


@triton.jit
def _join_kernel(
    sums_RNZH: tl.tensor,
    log_totals_RNZ: tl.tensor,
    lengths_R: tl.tensor,
    out_RNH: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """The mean of one head's parts, weighted by their totals, if there are several."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_R + row)
    part = part_tokens(length, PART, PARTS)
    if part >= length:
        return
    count = tl.cdiv(length, part)
    at = (row * HEADS + head) * PARTS
    all_Z, dim_H = tl.arange(0, PARTS), tl.arange(0, HEAD)
    best = tl.max(tl.load(log_totals_RNZ + at + all_Z, mask=all_Z < count, other=float("-inf")), axis=0)
    sum_H, total = tl.zeros((HEAD,), tl.float32), 0.0
    for first in range(0, count, JOINED):
        split_Z = first + tl.arange(0, JOINED)
        filled_Z = split_Z < count
        weight_Z = tl.exp2(tl.load(log_totals_RNZ + at + split_Z, mask=filled_Z, other=float("-inf")) - best)
        sums_at_ZH = (at + split_Z)[:, None] * HEAD + dim_H[None, :]
        mean_ZH = tl.load(sums_RNZH + sums_at_ZH, mask=filled_Z[:, None], other=0.0)
        sum_H += tl.sum(mean_ZH * weight_Z[:, None], axis=0)
        total += tl.sum(weight_Z, axis=0)
    tl.store(out_RNH + (row * HEADS + head) * HEAD + dim_H, (sum_H / total).to(out_RNH.dtype.element_ty))


class DecodeAttention:
    """Attention for up to `num_rows` sequences, with the memory that it needs between its kernels."""

    def __init__(
        self, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert head_dim in HEAD_DIMS, f"a head size of {head_dim}"
        self._config = _FLOAT32 if dtype == torch.float32 else _TWO_BYTES
        assert _PART % self._config.tokens == 0, "parts of whole tiles"
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        parts = (num_rows, num_heads, MAX_PARTS)
        self._sums_RNZH = torch.empty((*parts, head_dim), dtype=torch.float32, device=device)
        self._log_totals_RNZ = torch.empty(parts, dtype=torch.float32, device=device)
        self._parts_I = torch.empty(1 + num_rows * MAX_PARTS, dtype=torch.int32, device=device)
        """How many there are; then each one's row and place."""

    def plan(self, lengths_R: Tensor) -> Launch:
        """Find the parts of contexts of these lengths (int32), before the first layer of a step."""
        num_rows = len(lengths_R)
        constants = {"ROWS": _PLANNED, "PART": _PART, "PARTS": MAX_PARTS}
        return Launch(_plan_kernel, (num_rows,), (lengths_R, self._parts_I, num_rows), constants, num_warps=2)

    def launches(
        self, qkv_RA: Tensor, slots_2SKH: Tensor, tables_RW: Tensor, lengths_R: Tensor, block_size: int, out_RNH: Tensor
    ) -> list[Launch]:
        """Row r of `qkv_RA` starts with its rotated query heads and sees `lengths_R[r]` tokens, its own included, through
        the blocks `tables_RW[r]`. A row of length 0 is left out: its result is not written. `plan` has run for these lengths.
        """
        num_rows, heads, kv_heads, head_dim = len(qkv_RA), self._num_heads, self._num_kv_heads, self._head_dim
        group = heads // kv_heads
        parts = {"PART": _PART, "PARTS": MAX_PARTS}
        attend = Launch(
            _decode_kernel,
            (min(_PROGRAMS, num_rows * kv_heads * MAX_PARTS),),
            (
                *(qkv_RA, slots_2SKH[0], slots_2SKH[1], tables_RW, lengths_R, self._parts_I, out_RNH),
                *(self._sums_RNZH, self._log_totals_RNZ, tables_RW.shape[1]),
            ),
            {
                "WIDTH": qkv_RA.shape[1],
                "KV_HEADS": kv_heads,
                "GROUP": group,
                "HEAD": head_dim,
                "BLOCK": block_size,
                "TILE": self._config.tokens,
                "ROWS": max(MIN_DOT, power_of_two(group)),
                **parts,
                "SCALE": scale_log2(head_dim),
            },
            self._config.num_warps,
            self._config.num_stages,
        )
        constants = {"HEADS": heads, "HEAD": head_dim, **parts, "JOINED": _JOINED}
        args = (self._sums_RNZH, self._log_totals_RNZ, lengths_R, out_RNH)
        return [attend, Launch(_join_kernel, (heads, num_rows), args, constants, num_warps=4)]
