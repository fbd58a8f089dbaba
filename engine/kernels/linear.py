"""Matrix products with weights that are laid out once for the processor's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.triton.product import GpuLinear

_PACK_FOR_ROWS = 8
"""The row count that oneDNN is asked to pack for. On AVX-512 one layout serves 1 to 512 rows equally well."""


class Linear:
    """`y = x Wᵀ + b`. The weight must not change afterwards: where it is packed, this holds a copy.

    Where oneDNN is at hand the weight is stored in its blocked layout (the operators that Inductor's freezing uses).
    Measured against `F.linear` on one AVX-512 core with SmolLM2's shapes: 2.0 times as fast at 1 row in bfloat16 and 2.5
    times at 256 rows in float32. Moreover a row's result has the same bits at any number of rows from 2 on. Only a single
    row is summed in another order; where answers are to be exact (`same_bits`), it is therefore computed twice.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, *, same_bits: bool) -> None:
        self._bias_O = bias_O
        self._packed = _can_pack(weight_OI)
        self._doubles_single_rows = self._packed and same_bits
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACK_FOR_ROWS) if self._packed else weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O], in the weight's dtype."""
        if self._doubles_single_rows and x_TI.shape[0] == 1:
            return self(x_TI.repeat(2, 1))[:1]
        if self._packed:
            y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias_O, "none", [], "")
            return y_TO
        return F.linear(x_TI, self._weight, self._bias_O)

    def logits(self, x_TI: Tensor) -> Tensor:
        """Return the product of [T, I] as float32 logits [T, O]."""
        return self(x_TI).float()


def linear_for(weight_OI: Tensor, bias_O: Tensor | None = None, *, same_bits: bool) -> Linear | GpuLinear:
    """Return the product with a weight where it lies. On a GPU a row has the same bits in any company, asked for or not."""
    if not weight_OI.is_cuda:
        return Linear(weight_OI, bias_O, same_bits=same_bits)
    # Triton exists for Linux alone, and machines without a GPU need not wait for its import.
    from engine.kernels.triton.product import GpuLinear

    return GpuLinear(weight_OI, bias_O)


def _can_pack(weight_OI: Tensor) -> bool:
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32
