"""Attention of one new token per sequence to its whole context in the pool.

The query heads of a group are the rows of one matrix product, so keys and values are read once per group. A context may be
split among several programs whose sums a second kernel joins: few long sequences then fill the GPU too (Flash-Decoding,
Dao et al., 2023). Into how many parts depends on the shape of the launch alone, so a sequence's sums are taken in another order
among other numbers of sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.kernels.triton.launch import Launch, power_of_two
from engine.kernels.triton.online_softmax import HEAD_DIMS, MIN_DOT, TileConfig, attend_tiles, scale_log2

_PROGRAMS = 4 * 132
"""Programs that keep an H200 busy: its 132 multiprocessors, several times."""
_MAX_SPLITS = 64
_TWO_BYTES = TileConfig(tokens=64, num_warps=4, num_stages=3)
"""Small enough for five programs on a multiprocessor of an H200: some wait for memory while others compute."""
_FLOAT32 = TileConfig(tokens=32, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["table_width"])
def _decode_kernel(
    q_RA: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    tables_RW: tl.tensor,
    lengths_R: tl.tensor,
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
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """One sequence, key/value head and part of the context."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_R + row)
    part = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    begin = split * part
    end = tl.minimum(begin + part, length)
    if begin >= end:
        return
    group_M, dim_H = tl.arange(0, ROWS), tl.arange(0, HEAD)
    head_M = kv_head * GROUP + group_M
    used_M = group_M < GROUP
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
        end,
        KV_HEADS * HEAD,
        HEAD,
        BLOCK,
        TILE,
        SCALE,
        True,
    )
    head_at_M = row * (KV_HEADS * GROUP) + head_M
    mean_MH = sum_MH / total_M[:, None]
    if SPLITS == 1:
        out_at_MH = head_at_M[:, None] * HEAD + dim_H[None, :]
        tl.store(out_RNH + out_at_MH, mean_MH.to(out_RNH.dtype.element_ty), mask=used_M[:, None])
    else:
        split_at_M = head_at_M * SPLITS + split
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
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """The mean of one head's parts, weighted by their totals."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_R + row)
    if length == 0:
        return
    part = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    split_Z, dim_H = tl.arange(0, SPLITS), tl.arange(0, HEAD)
    filled_Z = split_Z * part < length
    at = row * HEADS + head
    log_total_Z = tl.load(log_totals_RNZ + at * SPLITS + split_Z, mask=filled_Z, other=float("-inf"))
    weight_Z = tl.exp2(log_total_Z - tl.max(log_total_Z, axis=0))
    sums_at_ZH = (at * SPLITS + split_Z)[:, None] * HEAD + dim_H[None, :]
    mean_ZH = tl.load(sums_RNZH + sums_at_ZH, mask=filled_Z[:, None], other=0.0)
    mean_H = tl.sum(mean_ZH * weight_Z[:, None], axis=0) / tl.sum(weight_Z, axis=0)
    tl.store(out_RNH + at * HEAD + dim_H, mean_H.to(out_RNH.dtype.element_ty))


def num_splits(num_rows: int, num_kv_heads: int, max_tiles: int) -> int:
    """Parts of each context, a power of two: enough to fill the GPU, as long as each may hold a tile."""
    wanted = ceil_div(_PROGRAMS, max(num_rows * num_kv_heads, 1))
    return min(power_of_two(wanted), power_of_two(max_tiles), _MAX_SPLITS)


class DecodeAttention:
    """Attention for up to `num_rows` sequences of `max_tokens` or fewer, with the memory that it needs between its kernels."""

    def __init__(
        self,
        num_rows: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert head_dim in HEAD_DIMS, f"a head size of {head_dim}"
        self._config = _FLOAT32 if dtype == torch.float32 else _TWO_BYTES
        self._splits = num_splits(num_rows, num_kv_heads, ceil_div(max_tokens, self._config.tokens))
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        parts = (num_rows, num_heads, self._splits)
        self._sums_RNZH = torch.empty((*parts, head_dim), dtype=torch.float32, device=device)
        self._log_totals_RNZ = torch.empty(parts, dtype=torch.float32, device=device)

    def launches(
        self, qkv_RA: Tensor, slots_2SKH: Tensor, tables_RW: Tensor, lengths_R: Tensor, block_size: int, out_RNH: Tensor
    ) -> list[Launch]:
        """Row r of `qkv_RA` starts with its rotated query heads and sees `lengths_R[r]` tokens, its own included, through
        the blocks `tables_RW[r]`. A row of length 0 is left out: its result is not written.
        """
        num_rows, heads, kv_heads, head_dim = len(qkv_RA), self._num_heads, self._num_kv_heads, self._head_dim
        group = heads // kv_heads
        attend = Launch(
            _decode_kernel,
            (kv_heads, self._splits, num_rows),
            (
                *(qkv_RA, slots_2SKH[0], slots_2SKH[1], tables_RW, lengths_R, out_RNH),
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
                "SPLITS": self._splits,
                "SCALE": scale_log2(head_dim),
            },
            self._config.num_warps,
            self._config.num_stages,
        )
        if self._splits == 1:
            return [attend]
        constants = {"HEADS": heads, "HEAD": head_dim, "TILE": self._config.tokens, "SPLITS": self._splits}
        args = (self._sums_RNZH, self._log_totals_RNZ, lengths_R, out_RNH)
        return [attend, Launch(_join_kernel, (heads, num_rows), args, constants, num_warps=4)]
