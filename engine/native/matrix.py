"""Matrices packed for the native products."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.quantized import QuantizedWeight
from engine.native.library import COLUMNS, NativeLibrary, can_pack, pack_dense, pack_quantized

MAX_ROWS = {4: 32, 8: 8}
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
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, torch.bfloat16)

    def logits(self, x_TI: Tensor) -> Tensor:
        """The same product with a result in float32."""
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, torch.float32)


class NativeHead:
    """Float32 logits, by a bfloat16 weight or, for few rows, by the same one quantized.

    Without the latter, rows have the same bits in any company.
    """

    def __init__(self, weight_VD: Tensor, few_rows: QuantizedMatrix | None, library: NativeLibrary) -> None:
        assert self.fits(weight_VD), f"{list(weight_VD.shape)} can't be packed"
        self._packed = pack_dense(weight_VD)
        self._vocab_size = len(weight_VD)
        self._few_rows = few_rows
        self._library = library

    @staticmethod
    def fits(weight_VD: Tensor) -> bool:
        vocab_size, hidden_size = weight_VD.shape
        return vocab_size % COLUMNS == 0 and hidden_size % 2 == 0

    def __call__(self, x_SD: Tensor) -> Tensor:
        """[S, D] to [S, V]."""
        if self._few_rows is not None and x_SD.shape[0] <= self._few_rows.max_rows:
            return self._few_rows.logits(x_SD)
        return self._library.dense_logits(x_SD, self._packed, self._vocab_size)
