"""A quantized matrix, packed for the native product."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.quantized import QuantizedWeight
from engine.native.library import NativeLibrary, can_pack, pack_quantized

MAX_ROWS = {4: 16, 8: 8}
"""Up to here four and eight bits take less time than bfloat16: docs/engine.md."""


class QuantizedMatrix:
    """`y = x Wᵀ` in bfloat16, with the weight's values, scales and minimums as they are.

    A row's result has the same bits at any number of rows.
    """

    def __init__(self, weight: QuantizedWeight, library: NativeLibrary) -> None:
        assert can_pack(weight.values_OI), f"{list(weight.values_OI.shape)} does not divide into records"
        self._library = library
        self._outputs = len(weight.values_OI)
        self._bits = weight.bits
        self.max_rows = MAX_ROWS[weight.bits]
        self._records = pack_quantized(weight.values_OI, weight.scales_OG, weight.minimums_OG, weight.bits)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._library.quantized_linear(x_TI, self._records, self._outputs, self._bits)
