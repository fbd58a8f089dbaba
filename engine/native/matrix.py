"""Matrices packed for the native products."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized import QuantizedWeight
from engine.native.library import COLUMNS, NativeLibrary, can_pack, pack_dense, pack_quantized

MAX_ROWS = {4: 32, 8: 8}
"""Up to here four and eight bits take less time than bfloat16 by oneDNN, on AVX-512: docs/engine.md."""
ANY_ROWS = sys.maxsize


class QuantizedMatrix:
    """`y = x Wᵀ` in the library's type, with the weight's values, scales and minimums as they are.

    A row's result has the same bits at any number of rows.
    """

    def __init__(self, weight: QuantizedWeight, library: NativeLibrary) -> None:
        assert can_pack(weight.values_OI), f"{list(weight.values_OI.shape)} does not divide into records"
        self._library = library
        self._outputs = len(weight.values_OI)
        self._bits = weight.bits
        self.max_rows = ANY_ROWS if library.any_rows else MAX_ROWS[weight.bits]
        self._records = pack_quantized(weight.values_OI, weight.scales_OG, weight.minimums_OG, weight.bits)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, self._library.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        """The same product with a result in float32."""
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, torch.float32)


class DenseMatrix:
    """`y = x Wᵀ` with a weight of the library's type, for libraries with products for any rows.

    A row's result has the same bits at any number of rows.
    """

    def __init__(self, weight_OI: Tensor, library: NativeLibrary) -> None:
        assert self.fits(weight_OI, library)
        self._library = library
        self._outputs = len(weight_OI)
        self._padded = self._outputs + -self._outputs % COLUMNS
        self._packed = pack_dense(F.pad(weight_OI, (0, 0, 0, self._padded - self._outputs)))

    @staticmethod
    def fits(weight_OI: Tensor, library: NativeLibrary) -> bool:
        """Whether the library multiplies such weights: those in bfloat16 need an even number of inputs."""
        return library.any_rows and (library.dtype == torch.float32 or weight_OI.shape[1] % 2 == 0)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        y_TO = self._library.dense_product(x_TI, self._packed, self._padded, self._library.dtype)
        return y_TO if self._padded == self._outputs else y_TO[:, : self._outputs].contiguous()


class NativeLinear:
    """`y = x Wᵀ + b`, for any number of rows."""

    def __init__(self, matrix: Callable[[Tensor], Tensor], bias_O: Tensor | None) -> None:
        self._matrix = matrix
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        product_TO = self._matrix(x_TI)
        return product_TO if self._bias_O is None else product_TO.add_(self._bias_O)


class NativeHead:
    """Float32 logits, by a weight of the library's type or, for as many rows as it takes, by the same one quantized.

    Without the latter rows have the same bits in any company.
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
        return self._library.dense_product(x_SD, self._packed, self._vocab_size, torch.float32)
