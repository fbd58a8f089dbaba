"""Attention of one new token per sequence to its whole context in the pool.

The query heads of a group are the rows of one matrix product, so keys and values are read once per group. The parts of a
context (`engine.kernels.triton.context_parts`) are computed beside each other and joined by a last kernel: few long sequences
then fill the GPU too (Flash-Decoding, Dao et al., 2023).

    plan, once a step ──► parts of all contexts, one behind the other ──► each program takes one after the other ──► join

What there is to do is thus shared evenly among programs, as many as keep an H200 busy. A launch depends on the number of rows
alone: lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import context_parts
from engine.kernels.triton.context_parts import part_bounds, part_count, parts_of
from engine.kernels.triton.launch import Launch, power_of_two
from engine.kernels.triton.online_softmax import (
    HEAD_DIMS,
    MIN_DOT,
    TILE_TOKENS,
    ProgramConfig,
    add_part,
    attend_tiles,
    first_tile,
    nothing_seen,
    scale_log2,
    total_of,
)

_PLANNED = 128
"""Rows, and parts of a row, that the first kernel looks at at once."""
_JOINED = 8
"""Parts that the last kernel loads at once."""
_PROGRAMS = 8 * 132
"""Programs that keep an H200 busy: its 132 multiprocessors, several times."""
_TWO_BYTES = ProgramConfig(num_warps=2, num_stages=2)
"""Small, so that many programs fit on a multiprocessor: some wait for memory while others compute."""
_FLOAT32 = ProgramConfig(num_warps=8, num_stages=2)


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    lengths_R: tl.tensor,
    parts_I: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    DOUBLED: tl.constexpr,
) -> None:
    """One row's parts, each as row * PARTS + part, behind those of the rows before it. The last row's program counts all."""
    row = tl.program_id(0)
    place = tl.full((), 1, tl.int32)
    for begin in range(0, row, ROWS):
        before_R = begin + tl.arange(0, ROWS)
        lengths_before_R = tl.load(lengths_R + before_R, mask=before_R < row, other=0)
        place += tl.sum(parts_of(lengths_before_R, FIRST, DOUBLED), axis=0)
    count = parts_of(tl.load(lengths_R + row), FIRST, DOUBLED)
    for first in range(0, count, ROWS):
        part_Z = first + tl.arange(0, ROWS)
        tl.store(parts_I + place + part_Z, row * PARTS + part_Z, mask=part_Z < count)
    if row == num_rows - 1:
        tl.store(parts_I, place + count - 1)


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
    totals_RNZ: tl.tensor,
    bests_RNZ: tl.tensor,
    table_width: tl.tensor,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    DOUBLED: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Some parts of some contexts, each for one key/value head."""
    group_M, dim_H = tl.arange(0, ROWS), tl.arange(0, HEAD)
    used_M = group_M < GROUP
    for item in range(tl.program_id(0), tl.load(parts_I) * KV_HEADS, tl.num_programs(0)):
        kv_head, place = item % KV_HEADS, tl.load(parts_I + 1 + item // KV_HEADS)
        row, part = (place // PARTS).to(tl.int64), place % PARTS
        length = tl.load(lengths_R + row)
        begin, next_begin = part_bounds(part, FIRST, DOUBLED)
        if WINDOW > 0:
            begin = first_tile(begin, length, WINDOW, TILE)
        head_M = kv_head * GROUP + group_M
        q_MH = tl.load(q_RA + row * WIDTH + head_M[:, None] * HEAD + dim_H[None, :], mask=used_M[:, None], other=0.0)
        sum_MH, totals_MX, best_M = nothing_seen(ROWS, HEAD)
        sum_MH, totals_MX, best_M = attend_tiles(
            q_MH,
            sum_MH,
            totals_MX,
            best_M,
            tl.zeros((ROWS,), tl.int32) + length,
            k_SKH + kv_head * HEAD,
            v_SKH + kv_head * HEAD,
            tables_RW + row * table_width,
            begin,
            tl.minimum(next_begin, length),
            KV_HEADS * HEAD,
            HEAD,
            BLOCK,
            TILE,
            SCALE,
            True,
            WINDOW,
        )
        head_at_M, total_M = row * (KV_HEADS * GROUP) + head_M, total_of(totals_MX)
        if length <= FIRST:
            out_at_MH = head_at_M[:, None] * HEAD + dim_H[None, :]
            mean_MH = (sum_MH / total_M[:, None]).to(out_RNH.dtype.element_ty)
            tl.store(out_RNH + out_at_MH, mean_MH, mask=used_M[:, None])
        else:
            part_at_M = head_at_M * PARTS + part
            tl.store(sums_RNZH + part_at_M[:, None] * HEAD + dim_H[None, :], sum_MH, mask=used_M[:, None])
            tl.store(totals_RNZ + part_at_M, total_M, mask=used_M)
            tl.store(bests_RNZ + part_at_M, best_M, mask=used_M)


@triton.jit
def _join_kernel(
    sums_RNZH: tl.tensor,
    totals_RNZ: tl.tensor,
    bests_RNZ: tl.tensor,
    lengths_R: tl.tensor,
    out_RNH: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    DOUBLED: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """One head's parts, if there are several, added up in their order."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_R + row)
    if length <= FIRST:
        return
    at, count = (row * HEADS + head) * PARTS, parts_of(length, FIRST, DOUBLED)
    one_M, dim_H = tl.arange(0, 1), tl.arange(0, HEAD)
    sum_MH = tl.zeros((1, HEAD), tl.float32)
    total_M = tl.zeros((1,), tl.float32)
    best_M = tl.full((1,), float("-inf"), tl.float32)
    for first in range(0, count, JOINED):
        for one in tl.static_range(JOINED):  # so that their loads do not wait for each other
            part_M = first + one + one_M
            is_one_M, at_M = part_M < count, at + part_M
            part_best_M = tl.load(bests_RNZ + at_M, mask=is_one_M, other=float("-inf"))
            part_total_M = tl.load(totals_RNZ + at_M, mask=is_one_M, other=0.0)
            part_sum_MH = tl.load(sums_RNZH + at_M[:, None] * HEAD + dim_H[None, :], mask=is_one_M[:, None], other=0.0)
            # Parts that are not there add nothing, exactly.
            sum_MH, total_M, best_M = add_part(sum_MH, total_M, best_M, part_sum_MH, part_total_M, part_best_M, SCALE)
    out_at_MH = (row * HEADS + head) * HEAD + dim_H[None, :]
    tl.store(out_RNH + out_at_MH, (sum_MH / total_M[:, None]).to(out_RNH.dtype.element_ty))


class DecodeAttention:
    """Attention for up to `num_rows` sequences of up to `max_len` tokens, with the memory that it needs between its kernels."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert head_dim in HEAD_DIMS, f"a head size of {head_dim}"
        self._config = _FLOAT32 if dtype == torch.float32 else _TWO_BYTES
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._parts = {
            "PARTS": part_count(max_len),
            "FIRST": context_parts.FIRST_TOKENS,
            "DOUBLED": context_parts.DOUBLED_AFTER,
        }
        parts = (num_rows, num_heads, self._parts["PARTS"])
        self._sums_RNZH = torch.empty((*parts, head_dim), dtype=torch.float32, device=device)
        self._totals_RNZ, self._bests_RNZ = (torch.empty(parts, dtype=torch.float32, device=device) for _ in range(2))
        self._parts_I = torch.empty(1 + num_rows * self._parts["PARTS"], dtype=torch.int32, device=device)
        """How many there are; then each one's row and place."""

    def plan(self, lengths_R: Tensor) -> Launch:
        """Find the parts of contexts of these lengths (int32), before the first layer of a step."""
        num_rows = len(lengths_R)
        constants = {"ROWS": _PLANNED, **self._parts}
        return Launch(_plan_kernel, (num_rows,), (lengths_R, self._parts_I, num_rows), constants, num_warps=2)

    def launches(
        self,
        qkv_RA: Tensor,
        slots_2SKH: Tensor,
        tables_RW: Tensor,
        lengths_R: Tensor,
        block_size: int,
        out_RNH: Tensor,
        window: int = 0,
    ) -> list[Launch]:
        """Row r of `qkv_RA` starts with its rotated query heads and sees `lengths_R[r]` tokens, its own included, through
        the blocks `tables_RW[r]`; with a `window` it sees the last ones of them. A row of length 0 is left out: its result is
        not written. `plan` has run for these lengths.
        """
        num_rows, heads, kv_heads, head_dim = len(qkv_RA), self._num_heads, self._num_kv_heads, self._head_dim
        group = heads // kv_heads
        between = (self._sums_RNZH, self._totals_RNZ, self._bests_RNZ)
        scale = {"SCALE": scale_log2(head_dim)}
        attend = Launch(
            _decode_kernel,
            (min(_PROGRAMS, num_rows * kv_heads * self._parts["PARTS"]),),
            (
                *(qkv_RA, slots_2SKH[0], slots_2SKH[1], tables_RW, lengths_R, self._parts_I, out_RNH),
                *(*between, tables_RW.shape[1]),
            ),
            {
                "WIDTH": qkv_RA.shape[1],
                "KV_HEADS": kv_heads,
                "GROUP": group,
                "HEAD": head_dim,
                "BLOCK": block_size,
                "TILE": TILE_TOKENS[qkv_RA.dtype.itemsize],
                "ROWS": max(MIN_DOT, power_of_two(group)),
                **scale,
                **self._parts,
                "WINDOW": window,
            },
            self._config.num_warps,
            self._config.num_stages,
        )
        constants = {"HEADS": heads, "HEAD": head_dim, **scale, **self._parts, "JOINED": _JOINED}
        return [attend, Launch(_join_kernel, (heads, num_rows), (*between, lengths_R, out_RNH), constants, num_warps=1)]
