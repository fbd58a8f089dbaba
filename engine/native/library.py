"""The native operators as functions on tensors: shapes are checked here, because C++ trusts its pointers.

All tensors are contiguous, on the CPU, and of the library's type, bfloat16 or float32, unless another one is named. A pool may
be quantized: then it is of bytes (`engine.kernels.kv_cache`), and k is turned in place before it is stored. Shape
suffixes as in `engine.kernels`; A is the width of a row that holds q, k and v: A = (N + 2 K) * H.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from configs.facts import KV_SCALE_BYTES
from configs.profiles import MeasuredProduct
from engine.kernels.quantized import GROUP
from engine.native.build import Built, load_alike, load_library
from engine.native.packing import COLUMNS, OUTPUT_MULTIPLE
from engine.native.recording import Calls, Recording
from engine.native.signatures import declare, suffix_of

HEAD_DIMS = (64, 128)
NO_WINDOW = 1 << 62
"""Tokens that a token sees where there is no sliding window: more than there are."""

_ROWS_AS_READ = 16
"""Rows of a key/value head that look at a context as it is read: `kAsRead` of avx512_bf16/common.h."""


def few_tokens(group: int) -> int:
    """Return for how many tokens of a sequence `NativeLibrary.decode_attention` is meant.

    A key/value head has `group` query heads.
    """
    return max(1, _ROWS_AS_READ // group)


class NativeLibrary:
    """The operators of one instruction set for one type. Made by `load`.

    Products may be those of other sets of the same arithmetic, which give the same bits: `prefer`.
    """

    @classmethod
    def load(cls, threads: int, dtype: torch.dtype, measured: Sequence[MeasuredProduct] = ()) -> NativeLibrary | None:
        """The operators for `dtype`, each of which may use `threads` cores; None where `engine.native.build` has none.

        Products are computed as was `measured` to be fastest here.
        """
        built = load_library(dtype)
        if built is None:
            return None
        library = cls(built, threads, dtype)
        if any(choice.library != built.instruction_set.name for product in measured for choice in product.choices):
            library.prefer(measured, load_alike(dtype))
        return library

    def __init__(self, built: Built, threads: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """bfloat16 or float32."""
        self.arithmetic = built.arithmetic
        """The operators' part of an arithmetic's name: `engine.native.build.Built`."""
        self.records_by_output = built.instruction_set.records_by_output
        """How quantized matrices are to be packed: `pack_quantized`."""
        self.functions = built.functions
        """The compiled functions. Those whose signatures stand here are declared."""
        self.threads = threads
        """Cores that an operator may use."""
        self._suffix = suffix_of(dtype)
        self._preferred: dict[tuple[int, int, int], tuple[Sequence[int], Sequence[Any]]] = {}
        """By bits, inputs and outputs of a product: numbers of rows, rising, and whose functions multiply from each on."""
        self.calls = Calls()
        """Makes the operators' calls: a step's other functions go through it, too, so that a recording has them all."""
        declare(built.functions, dtype)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """All that is computed meanwhile, by products and operators of this library, is noted."""
        recording = Recording(self.functions.replay)
        before, self.calls = self.calls, recording
        try:
            yield recording
        finally:
            self.calls = before
        recording.end()

    def prefer(self, measured: Sequence[MeasuredProduct], alike: Sequence[Built]) -> None:
        """Compute these products by the libraries that were chosen for them, of those given, which have one arithmetic.

        A library that is not among them leaves its products to this one's own.
        """
        assert all(built.arithmetic == self.arithmetic for built in alike)
        assert all(built.instruction_set.records_by_output == self.records_by_output for built in alike)
        for built in alike:
            declare(built.functions, self.dtype)
        by_name = {built.instruction_set.name: built.functions for built in alike}
        for product in measured:
            functions = [by_name.get(choice.library, self.functions) for choice in product.choices]
            rows = [choice.rows for choice in product.choices]
            self._preferred[product.bits, product.inputs, product.outputs] = rows, functions

    def add_rms_norm(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, out_TD: Tensor) -> None:
        """Add `delta_TD` to the float32 `x_TD` in place; write the sum, over its root mean square, times the weight."""
        rows, width = x_TD.shape
        assert width % 16 == 0
        _check(self.dtype, weight_D, out_TD, *(() if delta_TD is None else (delta_TD,)))
        _check(torch.float32, x_TD)
        assert out_TD.shape == x_TD.shape
        assert delta_TD is None or delta_TD.shape == x_TD.shape
        delta = 0 if delta_TD is None else delta_TD.data_ptr()
        pointers = (x_TD.data_ptr(), delta, weight_D.data_ptr(), out_TD.data_ptr())
        self.calls.make(self._function("add_rms_norm"), *pointers, rows, width, eps, self.threads)

    def rotate_and_store(
        self, qkv_TA: Tensor, cos_TF: Tensor, sin_TF: Tensor, slots_T: Tensor, kv_2SKH: Tensor, num_heads: int
    ) -> None:
        """Turn q in place; turn k and write it and v into the pool's slots. cos, sin: float32 [T, H/2]; slots: int64."""
        tokens, kv_heads, size = qkv_TA.shape[0], kv_2SKH.shape[2], 2 * cos_TF.shape[1]
        assert qkv_TA.shape[1] == (num_heads + 2 * kv_heads) * size
        _check(self.dtype, qkv_TA)
        assert cos_TF.shape == sin_TF.shape == (tokens, size // 2)
        assert cos_TF.dtype == sin_TF.dtype == torch.float32
        rotate_and_store, keys, values = self._reader("rotate_and_store", kv_2SKH, size)
        self.calls.make(
            rotate_and_store,
            qkv_TA.data_ptr(),
            cos_TF.data_ptr(),
            sin_TF.data_ptr(),
            slots_T.data_ptr(),
            keys,
            values,
            tokens,
            num_heads,
            kv_heads,
            size,
            self.threads,
        )

    def decode_attention(
        self,
        qkv_TA: Tensor,
        kv_2SKH: Tensor,
        tables_BW: Tensor,
        lengths_B: Tensor,
        ends_B: Tensor,
        block_size: int,
        out_TNH: Tensor,
        window: int = 0,
    ) -> None:
        """Causal attention of the last few tokens of sequences, such as `few_tokens` of each.

        A sequence has `lengths_B` tokens in its blocks. Its rows end before row `ends_B`, where those of the next one begin;
        those without rows come last. Tables, lengths, ends: int64. With a `window` a token sees no more than that many, itself
        and those before it.
        """
        rows, num_heads, size = out_TNH.shape
        sequences = len(lengths_B)
        kv_heads = kv_2SKH.shape[2]
        _check(self.dtype, qkv_TA, out_TNH)
        assert qkv_TA.shape == (rows, (num_heads + 2 * kv_heads) * size)
        assert len(tables_BW) == len(ends_B) == sequences
        assert tables_BW.is_contiguous()
        assert tables_BW.dtype == lengths_B.dtype == ends_B.dtype == torch.int64
        attend, keys, values = self._reader("decode_attention", kv_2SKH, size)
        self.calls.make(
            attend,
            qkv_TA.data_ptr(),
            keys,
            values,
            tables_BW.data_ptr(),
            tables_BW.shape[1],
            lengths_B.data_ptr(),
            ends_B.data_ptr(),
            out_TNH.data_ptr(),
            sequences,
            num_heads,
            kv_heads,
            size,
            block_size,
            window or NO_WINDOW,
            size**-0.5,
            self.threads,
        )

    def prefill_attention(
        self,
        qkv_TA: Tensor,
        kv_2SKH: Tensor,
        table_W: Tensor,
        start: int,
        block_size: int,
        out_TNH: Tensor,
        window: int = 0,
    ) -> None:
        """Causal attention of tokens [start, start + T) of one sequence, whose keys and values are all in the pool.

        With a `window` each sees no more than that many, itself and those before it.
        """
        tokens, num_heads, size = out_TNH.shape
        kv_heads = kv_2SKH.shape[2]
        _check(self.dtype, qkv_TA, out_TNH)
        assert qkv_TA.shape == (tokens, (num_heads + 2 * kv_heads) * size)
        assert table_W.dtype == torch.int64
        assert table_W.shape[0] * block_size >= start + tokens
        attend, keys, values = self._reader("prefill_attention", kv_2SKH, size)
        self.calls.make(
            attend,
            qkv_TA.data_ptr(),
            keys,
            values,
            table_W.data_ptr(),
            out_TNH.data_ptr(),
            start,
            tokens,
            num_heads,
            kv_heads,
            size,
            block_size,
            window or NO_WINDOW,
            size**-0.5,
            self.threads,
        )

    def swiglu(self, gate_up_TI: Tensor, out_TI: Tensor) -> None:
        """`silu(gate) * up`, where the first half of the columns is the gate: [T, 2 I] to [T, I]."""
        rows, width = out_TI.shape
        assert gate_up_TI.shape == (rows, 2 * width)
        assert width % 16 == 0
        _check(self.dtype, gate_up_TI, out_TI)
        self.calls.make(self._function("swiglu"), gate_up_TI.data_ptr(), out_TI.data_ptr(), rows, width, self.threads)

    def quantized_product(self, x_TI: Tensor, records: Tensor, outputs: int, bits: int, dtype: torch.dtype) -> Tensor:
        """[T, I] to [T, O] in the library's type or float32; `records` as `pack_quantized` makes them."""
        rows, inputs = x_TI.shape
        _check_records(records, outputs, inputs, bits)
        _check(self.dtype, x_TI)
        y_TO = self.calls.result(rows, outputs, dtype)
        name = "quantized_linear" if dtype == self.dtype else "quantized_logits"
        multiply = self._product(name, bits, inputs, outputs, rows)
        pointers = (x_TI.data_ptr(), records.data_ptr(), y_TO.data_ptr())
        self.calls.make(multiply, *pointers, rows, inputs, outputs, bits, self.threads)
        return y_TO

    def dense_product(self, x_TI: Tensor, packed: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """[T, I] to [T, O], in the library's type or in float32; `packed` as `pack_dense` makes it."""
        rows, inputs = x_TI.shape
        _check_packed(packed, outputs, inputs)
        _check(self.dtype, x_TI, packed)
        y_TO = self.calls.result(rows, outputs, dtype)
        name = "dense_linear" if dtype == self.dtype else "dense_logits"
        multiply = self._product(name, 8 * self.dtype.itemsize, inputs, outputs, rows)
        pointers = (x_TI.data_ptr(), packed.data_ptr(), y_TO.data_ptr())
        self.calls.make(multiply, *pointers, rows, inputs, outputs, self.threads)
        return y_TO

    def quantized_embedding(self, ids_T: Tensor, records: Tensor, outputs: int, inputs: int, bits: int) -> Tensor:
        """The rows `ids_T` (int64) of a quantized matrix, in the library's type: [T, I]. Raises IndexError."""
        _check_records(records, outputs, inputs, bits)
        return self._embedding("quantized_embedding", ids_T, records, inputs, outputs, bits)

    def dense_embedding(self, ids_T: Tensor, packed: Tensor, outputs: int, inputs: int) -> Tensor:
        """The same of a dense matrix of `outputs` rows, which packing may have filled up."""
        _check_packed(packed, outputs + -outputs % COLUMNS, inputs)
        _check(self.dtype, packed)
        return self._embedding("dense_embedding", ids_T, packed, inputs, outputs)

    def _embedding(self, function: str, ids_T: Tensor, matrix: Tensor, inputs: int, outputs: int, *bits: int) -> Tensor:
        _check(torch.int64, ids_T)
        rows_TI = torch.empty((len(ids_T), inputs), dtype=self.dtype)
        look_up: Callable[..., bool] = getattr(self.functions, function + self._suffix)
        sizes = (len(ids_T), inputs, outputs, *bits, self.threads)
        if not look_up(matrix.data_ptr(), ids_T.data_ptr(), rows_TI.data_ptr(), *sizes):
            raise IndexError(f"a token is none of the {outputs} that have an embedding")
        return rows_TI

    def _function(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self.functions, name + self._suffix)
        return function

    def _reader(self, name: str, kv_2SKH: Tensor, size: int) -> tuple[Callable[..., None], int, int]:
        """The function for a pool of heads of `size`, quantized or not, and where its keys and its values begin."""
        assert size in HEAD_DIMS
        quantized = kv_2SKH.dtype == torch.uint8
        _check(torch.uint8 if quantized else self.dtype, kv_2SKH)
        assert kv_2SKH.shape[3] == size + (KV_SCALE_BYTES if quantized else 0)
        keys = kv_2SKH.data_ptr()
        return self._function(name + "_int8" if quantized else name), keys, keys + kv_2SKH.nbytes // 2

    def _product(self, name: str, bits: int, inputs: int, outputs: int, rows: int) -> Callable[..., None]:
        """The function of the library that this product with so many rows is left to."""
        preferred = self._preferred.get((bits, inputs, outputs))
        if preferred is None:
            return self._function(name)
        starts, functions = preferred
        function: Callable[..., None] = getattr(functions[max(0, bisect_right(starts, rows) - 1)], name + self._suffix)
        return function


def _check_records(records: Tensor, outputs: int, inputs: int, bits: int) -> None:
    assert bits in (4, 8)
    assert inputs > 0
    assert inputs % GROUP == outputs % OUTPUT_MULTIPLE == 0
    assert records.numel() == outputs * inputs // GROUP * (4 + GROUP * bits // 8)
    _check(torch.uint8, records)


def _check_packed(packed: Tensor, outputs: int, inputs: int) -> None:
    assert inputs > 0
    assert inputs % GROUP == outputs % COLUMNS == 0
    assert packed.numel() == outputs * inputs


def _check(dtype: torch.dtype, *tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == dtype, f"{tensor.dtype} where {dtype} is read"
        assert tensor.is_contiguous(), "strides are not read"
