"""Root mean square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, with the mean in float32; the result has the weight's dtype."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)
