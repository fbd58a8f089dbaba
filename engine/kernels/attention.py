"""Causal attention over the paged KV pool. Scores are scaled by 1/sqrt(H); grouped-query heads share keys and values."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERY_BLOCK = 64
"""Tokens whose scores are computed at once: large enough for the matrix product, small enough for the cache."""


def prefill_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, slots_2SKH: Tensor, context_slots_L: Tensor | None
) -> Tensor:
    """Attention of one prompt's consecutive new tokens to each other and to its earlier tokens in the pool: [T, N, H].

    A block of queries, the G heads of a group as rows of their own, is multiplied with all keys up to its last token;
    only the block's own square needs a mask. The scores have the dtype of q: in bfloat16 they are rounded before the
    softmax, which sums in float32. Measured on one AVX-512 core against torch's flash operator, 9 heads of 64: 2.5 to 3.5
    times as fast in bfloat16, 0.85 (4,096 tokens) to 1.5 times (512 tokens) in float32.
    """
    num_new, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    group = num_heads // num_kv_heads
    if context_slots_L is not None:
        k_context, v_context = slots_2SKH.index_select(1, context_slots_L)
        k_TKH, v_TKH = torch.cat((k_context, k_TKH)), torch.cat((v_context, v_TKH))
    keys_KHL, values_KLH = k_TKH.permute(1, 2, 0).contiguous(), v_TKH.transpose(0, 1).contiguous()
    scaled = (q_TNH * head_dim**-0.5).view(num_new, num_kv_heads, group, head_dim)
    queries = scaled.transpose(0, 1).reshape(num_kv_heads, num_new * group, head_dim)
    out = torch.empty_like(queries)
    later = _later_tokens(group, q_TNH.dtype)
    num_context = len(k_TKH) - num_new
    for begin in range(0, num_new, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, num_new)
        rows, visible = slice(begin * group, end * group), num_context + end
        scores = torch.bmm(queries[:, rows], keys_KHL[:, :, :visible])
        scores[:, :, num_context + begin :].add_(later[: (end - begin) * group, : end - begin])
        torch.bmm(torch.softmax(scores, dim=-1), values_KLH[:, :visible], out=out[:, rows])
    return out.view(num_kv_heads, num_new, group, head_dim).transpose(0, 1).reshape(num_new, num_heads, head_dim)


def decode_attention(q_BNH: Tensor, slots_2SKH: Tensor, slots_BL: Tensor, mask_B11L: Tensor) -> Tensor:
    """Attention of one new token per sequence to all tokens of its sequence, itself included. Returns [B, N, H].

    `slots_BL` is padded at the end, where `mask_B11L` is False. Padding must name a slot that holds a finite value,
    because its weight of zero does not cancel a NaN. If L is a multiple of 16, a row has the same bits whatever the
    padding and the other rows are (measured on AVX-512; in float32 only with one thread).
    """
    num_seqs, num_heads, head_dim = q_BNH.shape
    context_len, num_kv_heads = slots_BL.shape[1], slots_2SKH.shape[2]
    kv = slots_2SKH.index_select(1, slots_BL.reshape(-1))
    k_BKLH, v_BKLH = kv.view(2, num_seqs, context_len, num_kv_heads, head_dim).transpose(2, 3)
    # The G query heads of a group stand where a sequence's tokens would: no copy of K and V per query head.
    q_BKGH = q_BNH.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=mask_B11L)
    return out_BKGH.reshape(num_seqs, num_heads, head_dim)


@cache
def _later_tokens(group: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a block's own tokens: minus infinity for those after the query's."""
    square = torch.full((_QUERY_BLOCK, _QUERY_BLOCK), -torch.inf, dtype=dtype).triu(1)
    return square.repeat_interleave(group, dim=0)
