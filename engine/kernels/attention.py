"""Causal attention over the paged KV pool. Scores are scaled by 1/sqrt(H); grouped-query heads share keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def prefill_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, slots_2SKH: Tensor, context_slots_L: Tensor | None
) -> Tensor:
    """Attention of one prompt's consecutive new tokens to each other and to its earlier tokens in the pool.

    Without a context this is one causal call. With one, the context (all of it visible, so no mask is needed) and the
    new tokens (causal) are attended to apart and the two results weighed by their log-sum-exps, as FlashAttention does
    between blocks (Dao et al., 2022). Returns [T, N, H].
    """
    q, k, v = _heads_first(q_TNH), _heads_first(k_TKH), _heads_first(v_TKH)
    if context_slots_L is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)
    context_2LKH = slots_2SKH.index_select(1, context_slots_L)
    new, new_lse = _flash(q, k, v, causal=True)
    old, old_lse = _flash(q, _heads_first(context_2LKH[0]), _heads_first(context_2LKH[1]), causal=False)
    share_of_old = torch.sigmoid(old_lse - new_lse).to(q.dtype)[..., None]
    return torch.lerp(new, old, share_of_old)[0].transpose(0, 1)


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


def _heads_first(x_TNH: Tensor) -> Tensor:
    return x_TNH.transpose(0, 1)[None]


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [1, N, T, H] and the log-sum-exp of the scores [1, N, T], which the public operator keeps to itself."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse
