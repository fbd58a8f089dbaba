"""Matrices packed for the native products. A row's result has the same bits at any number of rows."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized import GROUP, QuantizedWeight
from engine.native.library import NativeLibrary
from engine.native.packing import COLUMNS, OUTPUT_MULTIPLE, can_pack, pack_dense, pack_quantized


class Matrix(Protocol):
    """A weight [O, I] to multiply rows by."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """`x Wᵀ`, [T, I] to [T, O], in the inputs' type."""
        ...

    def logits(self, x_TI: Tensor) -> Tensor:
        """Return the product of [T, I] as float32 logits [T, O]."""
        ...

    def embedding(self, ids_T: Tensor) -> Tensor:
        """The weight's rows of these numbers, int64 [T] to [T, I], in the library's type. Raises IndexError for others."""
        ...


class QuantizedMatrix:
    """A `Matrix` of a weight of four or eight bits, by its values, scales and minimums."""

    def __init__(self, records: Tensor, library: NativeLibrary) -> None:
        """`records` are what `pack` makes for the library; they tell the matrix's shape and its bits."""
        blocks, groups, record_bytes = records.shape
        self._library = library
        self._records = records
        self._outputs = blocks * OUTPUT_MULTIPLE
        self._inputs = groups * GROUP
        self._bits = 8 * (record_bytes // OUTPUT_MULTIPLE - 4) // GROUP

    @staticmethod
    def pack(weight: QuantizedWeight, library: NativeLibrary) -> Tensor:
        """The weight as one tensor of bytes, [O / 16, I / 32, bytes], in the order that the library reads."""
        assert can_pack(weight.values_OI), f"{list(weight.values_OI.shape)} does not divide into records"
        return pack_quantized(
            weight.values_OI, weight.scales_OG, weight.minimums_OG, weight.bits, records_by_output=library.records_by_output
        )

    @classmethod
    def of(cls, weight: QuantizedWeight, library: NativeLibrary) -> QuantizedMatrix:
        """Pack a weight and multiply by it."""
        return cls(cls.pack(weight, library), library)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, self._library.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        return self._library.quantized_product(x_TI, self._records, self._outputs, self._bits, torch.float32)

    def embedding(self, ids_T: Tensor) -> Tensor:
        return self._library.quantized_embedding(ids_T, self._records, self._outputs, self._inputs, self._bits)


class DenseMatrix:
    """A `Matrix` of a weight of the library's type. Shapes that don't divide into its parts are filled up with zeros."""

    def __init__(self, packed: Tensor, outputs: int, inputs: int, library: NativeLibrary) -> None:
        """`packed` is what `pack` makes of a weight [outputs, inputs]."""
        self._library = library
        self._packed = packed
        self._outputs, self._inputs = outputs, inputs
        self._more_outputs, self._more_inputs = _missing(outputs, inputs)

    @staticmethod
    def pack(weight_OI: Tensor) -> Tensor:
        """The weight as one tensor of its own type."""
        more_outputs, more_inputs = _missing(*weight_OI.shape)
        return pack_dense(F.pad(weight_OI, (0, more_inputs, 0, more_outputs)))

    @classmethod
    def of(cls, weight_OI: Tensor, library: NativeLibrary) -> DenseMatrix:
        """Pack a weight and multiply by it."""
        outputs, inputs = weight_OI.shape
        return cls(cls.pack(weight_OI), outputs, inputs, library)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, self._library.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI, torch.float32)

    def embedding(self, ids_T: Tensor) -> Tensor:
        rows_TI = self._library.dense_embedding(ids_T, self._packed, self._outputs, self._inputs + self._more_inputs)
        return rows_TI[:, : self._inputs].contiguous()

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        calls, rows = self._library.calls, len(x_TI)
        if self._more_inputs:
            filled_TI = torch.zeros(
                (rows, self._inputs + self._more_inputs), dtype=x_TI.dtype
            )  # not a result: one may have its shape
            calls.make(filled_TI[:, : self._inputs].copy_, x_TI)
            x_TI = filled_TI
        y_TO = self._library.dense_product(x_TI, self._packed, self._outputs + self._more_outputs, dtype)
        if not self._more_outputs:
            return y_TO
        wanted_TO = calls.result(rows, self._outputs, dtype)
        calls.make(wanted_TO.copy_, y_TO[:, : self._outputs])
        return wanted_TO


class NativeLinear:
    """`y = x Wᵀ + b`."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None, library: NativeLibrary) -> None:
        self._matrix = matrix
        self._bias_O = bias_O
        self._library = library

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        product_TO = self._matrix(x_TI)
        if self._bias_O is not None:
            self._library.calls.make(product_TO.add_, self._bias_O)
        return product_TO


def _missing(outputs: int, inputs: int) -> tuple[int, int]:
    """Outputs and inputs that fill a dense matrix up to whole parts."""
    return -outputs % COLUMNS, -inputs % GROUP
