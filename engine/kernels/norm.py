"""Root mean square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, with the mean in float32; the result has the weight's dtype."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)


def norm_heads(qkv_TA: Tensor, q_norm_H: Tensor, k_norm_H: Tensor, eps: float, num_kv_heads: int) -> None:
    """Norm each head of q and k in place. A row of qkv has the heads of q, then so many of k, and of v, each of H values."""
    qkv_TNH = qkv_TA.unflatten(1, (-1, q_norm_H.shape[0]))
    keys, values = -2 * num_kv_heads, -num_kv_heads
    qkv_TNH[:, :keys] = rms_norm(qkv_TNH[:, :keys], q_norm_H, eps)
    qkv_TNH[:, keys:values] = rms_norm(qkv_TNH[:, keys:values], k_norm_H, eps)
