"""Writing new keys and values to the pool, turned to their positions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.kernels.kv_cache import FP8_MOST
from engine.kernels.triton.launch import Launch

_HEADS_PER_PROGRAM = 8
_FP8_MOST: tl.constexpr = tl.constexpr(FP8_MOST)


@triton.jit
def _within_fp8(x: tl.tensor) -> tl.tensor:
    """Larger numbers become the largest; what is none stays none."""
    at_least = tl.maximum(x.to(tl.float32), -_FP8_MOST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at_least, _FP8_MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _is_finite(x: tl.tensor) -> tl.tensor:
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _rotate_and_store_kernel(
    qkv_TA: tl.tensor,
    cos_TF: tl.tensor,
    sin_TF: tl.tensor,
    slots_T: tl.tensor,
    k_SKH: tl.tensor,
    v_SKH: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
) -> None:
    """Some heads of one token. The heads of a row are those of q, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    if slot < 0:
        return
    head_N, pair_F = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM), tl.arange(0, HALF)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    inside_NF = (head_N < all_heads)[:, None]
    at_NF = ((token * all_heads + head_N) * (2 * HALF))[:, None] + pair_F[None, :]
    first_NF = tl.load(qkv_TA + at_NF, mask=inside_NF, other=0.0).to(tl.float32)
    second_NF = tl.load(qkv_TA + at_NF + HALF, mask=inside_NF, other=0.0).to(tl.float32)
    cos_F, sin_F = tl.load(cos_TF + token * HALF + pair_F)[None, :], tl.load(sin_TF + token * HALF + pair_F)[None, :]
    turns_NF = (head_N < HEADS + KV_HEADS)[:, None]
    one_NF = tl.where(turns_NF, first_NF * cos_F - second_NF * sin_F, first_NF).to(qkv_TA.dtype.element_ty)
    other_NF = tl.where(turns_NF, second_NF * cos_F + first_NF * sin_F, second_NF).to(qkv_TA.dtype.element_ty)
    is_q_NF = (head_N < HEADS)[:, None]
    tl.store(qkv_TA + at_NF, one_NF, mask=is_q_NF)
    tl.store(qkv_TA + at_NF + HALF, other_NF, mask=is_q_NF)
    is_k_NF = turns_NF & (head_N >= HEADS)[:, None]
    is_v_NF = inside_NF & (head_N >= HEADS + KV_HEADS)[:, None]
    # Attention's weight of 0 for a later token would not cancel a value that is not finite. What sees a key of NaN is NaN, too.
    value_at_NF = at_NF + KV_HEADS * (2 * HALF)
    first_value_NF = tl.load(qkv_TA + value_at_NF, mask=is_k_NF, other=0.0)
    second_value_NF = tl.load(qkv_TA + value_at_NF + HALF, mask=is_k_NF, other=0.0)
    good_N1 = tl.min((_is_finite(first_value_NF) & _is_finite(second_value_NF)).to(tl.int32), axis=1, keep_dims=True) > 0
    one_NF, other_NF = tl.where(good_N1, one_NF, float("nan")), tl.where(good_N1, other_NF, float("nan"))
    one_NF = tl.where(is_v_NF & ~_is_finite(one_NF), 0.0, one_NF)
    other_NF = tl.where(is_v_NF & ~_is_finite(other_NF), 0.0, other_NF)
    if k_SKH.dtype.element_ty.is_fp8():
        one_NF, other_NF = _within_fp8(one_NF), _within_fp8(other_NF)
    kv_type: tl.constexpr = k_SKH.dtype.element_ty
    one_NF, other_NF = one_NF.to(kv_type), other_NF.to(kv_type)
    k_at_NF = ((slot * KV_HEADS + head_N - HEADS) * (2 * HALF))[:, None] + pair_F[None, :]
    tl.store(k_SKH + k_at_NF, one_NF, mask=is_k_NF)
    tl.store(k_SKH + k_at_NF + HALF, other_NF, mask=is_k_NF)
    v_at_NF = k_at_NF - KV_HEADS * (2 * HALF)
    tl.store(v_SKH + v_at_NF, one_NF, mask=is_v_NF)
    tl.store(v_SKH + v_at_NF + HALF, other_NF, mask=is_v_NF)


def rotate_and_store(
    qkv_TA: Tensor, cos_TF: Tensor, sin_TF: Tensor, slots_T: Tensor, slots_2SKH: Tensor, num_heads: int
) -> Launch:
    """Turn q in place, by the cosines and sines [T, H/2] in float32; write k, turned, and v to the pool.

    Where a head of v is not finite, its k becomes NaN, and 0 stands for what is not finite: so only tokens that see it are NaN.
    A row whose slot is negative is left as it is.
    """
    num_tokens, num_kv_heads, head_dim = len(qkv_TA), *slots_2SKH.shape[2:]
    grid = (num_tokens, ceil_div(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM))
    constants = {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "HEADS_PER_PROGRAM": _HEADS_PER_PROGRAM,
    }
    args = (qkv_TA, cos_TF, sin_TF, slots_T, slots_2SKH[0], slots_2SKH[1])
    return Launch(_rotate_and_store_kernel, grid, args, constants, num_warps=2)
