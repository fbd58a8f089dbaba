"""Matrices packed for the native products. A row's result has the same bits at any number of rows."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized import GROUP, QuantizedWeight
from engine.native.library import COLUMNS, NativeLibrary, can_pack, pack_dense, pack_quantized


class Matrix(Protocol):
    """A weight [O, I] to multiply rows by."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """`x Wᵀ`, [T, I] to [T, O], in the inputs' type."""
        ...

    def logits(self, x_TI: Tensor) -> Tensor:
        """The same product with a result in float32."""
        ...


class QuantizedMatrix:
    """A `Matrix` of a weight of four or eight bits, by its values, scales and minimums."""

    def __init__(self, weight: QuantizedWeight, library: NativeLibrary) -> None:
        assert can_pack(weight.values_OI), f"{list(weight.values_OI.shape)} does not divide into records"
        self._library = library
        self._outputs = len(weight.values_OI)
        self._bits = weight.bits
        self._records = pack_quantized(weight.values_OI, weight.scales_OG, weight.minimums_OG, weight.bits)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, self._library.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, torch.float32)


class DenseMatrix:
    """A `Matrix` of a weight of the library's type. Shapes that don't divide into its parts are filled up with zeros."""

    def __init__(self, weight_OI: Tensor, library: NativeLibrary) -> None:
        self._library = library
        self._outputs, inputs = weight_OI.shape
        self._more_outputs, self._more_inputs = -self._outputs % COLUMNS, -inputs % GROUP
        self._packed = pack_dense(F.pad(weight_OI, (0, self._more_inputs, 0, self._more_outputs)))

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, self._library.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, torch.float32)

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        if self._more_inputs:
            x_TI = F.pad(x_TI, (0, self._more_inputs))
        y_TO = self._library.dense_product(x_TI, self._packed, self._outputs + self._more_outputs, dtype)
        return y_TO[:, : self._outputs].contiguous() if self._more_outputs else y_TO


class NativeLinear:
    """`y = x Wᵀ + b`."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        self._matrix = matrix
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        product_TO = self._matrix(x_TI)
        return product_TO if self._bias_O is None else product_TO.add_(self._bias_O)
