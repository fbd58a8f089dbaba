"""Moving tokens' keys and values between the KV pool and dense tensors, and the formats in which they lie there.

`slots_2SKH` is one layer of the pool, `KVPool.layer_slots(layer)`: [2 (K, V), slots, KV heads, head size], where slot
`block * block_size + offset` holds one token. Slot ids are int64 tensors; the caller guarantees that they are in range.

A head in int8 is bytes: one for each of its H numbers, 128 more than the whole number that this is over the head's scale, and
behind them the scale, a bfloat16 in two bytes. The scale is no number where one of the H is none, or infinite. In fp8 a head
is its numbers as E4M3 (Micikevicius et al., "FP8 formats for deep learning", 2022), the largest of which is 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.facts import KvCacheDtype

FP8_MOST = 448.0
"""The largest number of E4M3. Larger ones become it."""
_MOST = 127.0
"""The largest whole number of a head in int8."""
_MOST_SCALE = 2.0**121
"""The largest scale: 127 times the next bfloat16 would be infinite as one."""
_LEAST = 1e-30
"""Heads of smaller numbers count as zeros."""


def store_kv(slots_2SKH: Tensor, slot_mapping_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    """Write one layer's new keys and values into their slots."""
    slots_2SKH[0].index_copy_(0, slot_mapping_T, k_TKH)
    slots_2SKH[1].index_copy_(0, slot_mapping_T, v_TKH)


def stored_heads(numbers_H: Tensor, kv_cache_dtype: KvCacheDtype) -> Tensor:
    """Heads [..., H] as they lie in a pool of this format: uint8, or with `auto` as they are."""
    if kv_cache_dtype == "auto":
        return numbers_H
    if kv_cache_dtype == "fp8":
        return numbers_H.float().clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    return quantized_heads(numbers_H)


def numbers_of(heads: Tensor, kv_cache_dtype: KvCacheDtype, dtype: torch.dtype) -> Tensor:
    """The numbers [..., H] that heads of a pool stand for, in `dtype`. With `auto` they have it."""
    if kv_cache_dtype == "auto":
        return heads
    if kv_cache_dtype == "fp8":
        return heads.view(torch.float8_e4m3fn).to(dtype)
    return dequantized(heads, dtype)


def quantized_heads(numbers_H: Tensor) -> Tensor:
    """Heads [..., H] as uint8 [..., H + 2]."""
    exact_H = numbers_H.float()
    largest = exact_H.abs().amax(-1, keepdim=True) + (exact_H * 0.0).sum(-1, keepdim=True)
    scale = (largest / _MOST).clamp_(max=_MOST_SCALE).masked_fill_(largest < _LEAST, 0.0).bfloat16()
    inverse = (1.0 / scale.float()).masked_fill_(~(scale > 0), 0.0)
    whole_H = (exact_H * inverse).nan_to_num_(nan=-_MOST).round_().clamp_(-_MOST, _MOST)
    return torch.cat(((whole_H + 128.0).to(torch.uint8), scale.view(torch.uint8)), dim=-1)


def dequantized(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that quantized heads stand for, in `dtype`: uint8 [..., H + 2] to [..., H]."""
    scale = heads[..., -2:].contiguous().view(torch.bfloat16)
    return ((heads[..., :-2].float() - 128.0) * scale.float()).to(dtype)


def gather_tokens(slots_2SKH: Tensor, slot_ids_T: Tensor, out_2TKH: Tensor) -> None:
    """Copy tokens out of the pool, in the order of `slot_ids_T`, into `out_2TKH` (contiguous, the pool's dtype)."""
    if slots_2SKH.is_contiguous():
        torch.index_select(slots_2SKH, 1, slot_ids_T, out=out_2TKH)
        return
    for slots_SKH, out_TKH in zip(slots_2SKH, out_2TKH, strict=True):  # torch would first copy the layer as a whole
        torch.index_select(slots_SKH, 0, slot_ids_T, out=out_TKH)


def scatter_tokens(slots_2SKH: Tensor, slot_ids_T: Tensor, in_2TKH: Tensor) -> None:
    """Copy dense tokens into the pool: the inverse of `gather_tokens`. Slot ids must be distinct."""
    slots_2SKH.index_copy_(1, slot_ids_T, in_2TKH)
