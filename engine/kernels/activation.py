"""The gated activation of the feed-forward layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """`silu(gate) * up`, where the first half of the columns is the gate: [T, 2 I] to [T, I]."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate_TI).mul_(up_TI)
