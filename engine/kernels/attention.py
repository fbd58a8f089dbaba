"""Causal attention over the paged KV pool. Scores are scaled by 1/sqrt(H); grouped-query heads share keys and values."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERY_BLOCK = 64
"""Tokens whose scores are computed at once: large enough for the matrix product, small enough for the cache."""

_MIN_DENSE_TOKENS = 512
_MAX_DENSE_HEADS = 4
"""Where decoding in bfloat16 is faster by batched products: tokens gathered, key/value heads."""


def prefill_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, context_2LKH: Tensor | None, window: int = 0) -> Tensor:
    """Attention of one prompt's consecutive new tokens to each other and to its earlier tokens, `context_2LKH`: [T, N, H].

    With a `window` a token sees no more than that many, itself and those before it. What sees a token with a key or a value
    that is not finite is NaN.
    """
    if context_2LKH is not None:
        k_context, v_context = context_2LKH
        k_TKH, v_TKH = torch.cat((k_context, k_TKH)), torch.cat((v_context, v_TKH))
    if math.isfinite(k_TKH.sum() + v_TKH.sum()):
        return _finite_attention(q_TNH, k_TKH, v_TKH, window)
    # A weight of 0 would not cancel what is not finite: it is left out, and the tokens that see it are overwritten.
    bad_LK = ~(k_TKH.isfinite() & v_TKH.isfinite()).all(-1)
    k_LKH, v_LKH = (each_LKH.masked_fill(bad_LK[..., None], 0.0) for each_LKH in (k_TKH, v_TKH))
    token_L1 = torch.arange(len(bad_LK))[:, None]
    latest_bad_LK = torch.where(bad_LK, token_L1, -1).cummax(0).values
    first_seen_L1 = (token_L1 + 1 - (window or len(bad_LK))).clamp_(min=0)
    sees_bad_TK = (latest_bad_LK >= first_seen_L1)[-len(q_TNH) :]
    sees_bad_TN = sees_bad_TK.repeat_interleave(q_TNH.shape[1] // bad_LK.shape[1], dim=1)
    return _finite_attention(q_TNH, k_LKH, v_LKH, window).masked_fill_(sees_bad_TN[..., None], torch.nan)


def _finite_attention(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, window: int) -> Tensor:
    """Attention of the last T of L tokens to them all, where all keys and values are finite.

    A block of queries, the G heads of a group as rows of their own, is multiplied with all keys up to its last token;
    only the block's own square needs a mask. The scores have the dtype of q: in bfloat16 they are rounded before the
    softmax, which sums in float32. torch's own operator for CPUs multiplies bfloat16 at a fraction of this speed.
    """
    num_new, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_LKH.shape[1]
    group = num_heads // num_kv_heads
    keys_KHL, values_KLH = k_LKH.permute(1, 2, 0).contiguous(), v_LKH.transpose(0, 1).contiguous()
    scaled = (q_TNH * head_dim**-0.5).view(num_new, num_kv_heads, group, head_dim)
    queries = scaled.transpose(0, 1).reshape(num_kv_heads, num_new * group, head_dim)
    out = torch.empty_like(queries)
    later = _later_tokens(group, q_TNH.dtype)
    num_context = len(k_LKH) - num_new
    for begin in range(0, num_new, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, num_new)
        rows, visible = slice(begin * group, end * group), num_context + end
        scores = torch.bmm(queries[:, rows], keys_KHL[:, :, :visible])
        scores[:, :, num_context + begin :].add_(later[: (end - begin) * group, : end - begin])
        if window:
            tokens_R = torch.arange(num_context + begin, visible).repeat_interleave(group)
            scores.masked_fill_(torch.arange(visible) <= tokens_R[:, None] - window, -torch.inf)
        torch.bmm(torch.softmax(scores, dim=-1), values_KLH[:, :visible], out=out[:, rows])
    return out.view(num_kv_heads, num_new, group, head_dim).transpose(0, 1).reshape(num_new, num_heads, head_dim)


def decode_attention(q_BNH: Tensor, kv_2CKH: Tensor, bias_B1L: Tensor) -> Tensor:
    """Attention of one new token per sequence to all tokens of its sequence, itself included: [B, N, H].

    `kv_2CKH` holds L tokens for each of the B sequences, padding included (C = B * L), which must be finite and where
    `bias_B1L` is minus infinity. In float32 with one thread, if L is a multiple of 16, a row has the same bits whatever
    the padding and the other rows are (measured on AVX-512).
    """
    num_seqs, num_heads, head_dim = q_BNH.shape
    num_tokens, num_kv_heads = kv_2CKH.shape[1:3]
    kv_2BLKH = kv_2CKH.view(2, num_seqs, -1, num_kv_heads, head_dim)
    if q_BNH.dtype == torch.bfloat16 and num_tokens >= _MIN_DENSE_TOKENS and num_kv_heads <= _MAX_DENSE_HEADS:
        return _dense_decode_attention(q_BNH, kv_2BLKH, bias_B1L)
    k_BKLH, v_BKLH = kv_2BLKH.transpose(2, 3)
    # The G query heads of a group stand where a sequence's tokens would: no copy of K and V per query head.
    q_BKGH = q_BNH.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=bias_B1L[:, None])
    return out_BKGH.reshape(num_seqs, num_heads, head_dim)


def _dense_decode_attention(q_BNH: Tensor, kv_2BLKH: Tensor, bias_B1L: Tensor) -> Tensor:
    """The same by two batched products over whole tokens, K * H wide.

    A query head is a row that is zero but for its key/value head's part. That is K times the arithmetic of what is needed,
    and still less time for few K, because keys and values are read as they lie.
    """
    num_seqs, num_heads, head_dim = q_BNH.shape
    num_kv_heads = kv_2BLKH.shape[3]
    group = num_heads // num_kv_heads
    k_BLD, v_BLD = kv_2BLKH.flatten(3)
    own_head = _identity(num_kv_heads, q_BNH.dtype).view(num_kv_heads, 1, num_kv_heads, 1)
    q_BND = (q_BNH.reshape(num_seqs, num_kv_heads, group, 1, head_dim) * own_head).view(num_seqs, num_heads, -1)
    scores_BNL = torch.baddbmm(bias_B1L, q_BND, k_BLD.transpose(1, 2), alpha=head_dim**-0.5)
    out_BND = torch.bmm(torch.softmax(scores_BNL, dim=-1), v_BLD)
    out_BGHK = out_BND.view(num_seqs, num_kv_heads, group, num_kv_heads, head_dim).diagonal(dim1=1, dim2=3)
    return out_BGHK.permute(0, 3, 1, 2).reshape(num_seqs, num_heads, head_dim)


@cache
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)


@cache
def _later_tokens(group: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of a block's own tokens: minus infinity for those after the query's."""
    square = torch.full((_QUERY_BLOCK, _QUERY_BLOCK), -torch.inf, dtype=dtype).triu(1)
    return square.repeat_interleave(group, dim=0)
