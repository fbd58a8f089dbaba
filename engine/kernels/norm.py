"""Root mean square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; in bfloat16 the mean is taken in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)
