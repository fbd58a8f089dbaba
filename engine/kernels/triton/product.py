"""`x Wᵀ + b` whose sums have one order, so that a row's bits do not depend on the rows beside it.

Every value of the result is one chain over the inputs, in their order, as matrix units take them: 16 after the other. Tiles say
who computes a value and when, and never how. On an H100, tiles of 16 to 128 rows, 16 to 256 columns and 64 to 256 inputs gave
the same bits, by its older and by its newer instructions. cuBLAS cuts the chain where there are few rows, so as to have work
for all multiprocessors; here tiles are narrow instead.

    few rows      narrow tiles, each read once from memory, as many of them as keep it busy
    many rows     wide tiles, taken one after the other by as many programs as there are multiprocessors

Where the GPU has bulk copies (compute capability 9.0 and newer), both factors are read by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from configs.arithmetic import ceil_div
from engine.kernels.triton.launch import Launch

_BAND = 8
"""Tiles of rows that are computed beside each other, so that they find the weights in the cache."""


@dataclass(frozen=True)
class Tiles:
    """How a matrix product is cut into tiles."""

    rows: int
    columns: int
    inputs: int
    """Inputs that a program takes at once."""
    num_warps: int
    num_stages: int
    programs: int
    """Most programs for each multiprocessor."""


@dataclass(frozen=True)
class Multiprocessors:
    """The multiprocessors of a GPU: how many there are, and what each can do."""

    count: int
    shared_bytes: int
    """Bytes of shared memory that a program may have."""
    bulk_copies: bool


H100 = Multiprocessors(132, 232_448, bulk_copies=True)
_FLOAT32 = (Tiles(16, 32, 32, 4, 2, 2), Tiles(64, 64, 32, 8, 2, 1))
"""Outside of the matrix units."""
_UP_TO_16 = (Tiles(16, 32, 256, 4, 4, 2),)
_UP_TO_64 = (Tiles(64, 32, 128, 4, 4, 2), Tiles(64, 64, 128, 4, 3, 2))
_UP_TO_128 = (Tiles(128, 32, 128, 4, 4, 1), Tiles(128, 64, 128, 4, 4, 1), Tiles(128, 128, 128, 8, 3, 1))
_MORE = (Tiles(128, 64, 128, 8, 4, 1), Tiles(128, 128, 128, 8, 3, 1), Tiles(128, 256, 64, 8, 3, 1))
_WIDEST_FLOAT32 = 128
"""Columns of a result in float32. Wider ones take registers that there are not."""
_LEAST_INPUTS, _LEAST_STAGES = 64, 2
_BARRIER_BYTES = 1024
"""More than what copies are waited for with."""


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_TI: tl.tensor,
    weight_OI: tl.tensor,
    bias_O: tl.tensor,
    out_TO: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    BAND: tl.constexpr,
    BIAS: tl.constexpr,
    BULK: tl.constexpr,
) -> None:
    """Some tiles of the result, one after the other. With BULK both factors are descriptors, which read zeros beyond an end."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        first = tile // (BAND * column_tiles) * BAND
        height = tl.minimum(row_tiles - first, BAND)
        within = tile % (BAND * column_tiles)
        row, column = (first + within % height) * ROWS, within // height * COLUMNS
        row_R, column_C, input_I = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, INPUTS)
        inside_R, inside_C = row_R < num_rows, column_C < num_outputs
        sum_RC = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in tl.range(0, num_inputs, INPUTS):
            if BULK:
                x_RI, weight_CI = x_TI.load([row, begin]), weight_OI.load([column, begin])
            else:
                inside_I = begin + input_I < num_inputs
                x_at_RI = row_R.to(tl.int64)[:, None] * num_inputs + (begin + input_I)[None, :]
                x_RI = tl.load(x_TI + x_at_RI, mask=inside_R[:, None] & inside_I[None, :], other=0.0)
                weight_at_CI = column_C.to(tl.int64)[:, None] * num_inputs + (begin + input_I)[None, :]
                weight_CI = tl.load(weight_OI + weight_at_CI, mask=inside_C[:, None] & inside_I[None, :], other=0.0)
            sum_RC = tl.dot(x_RI, weight_CI.T, sum_RC, input_precision="ieee")
        if BIAS:
            sum_RC += tl.load(bias_O + column_C, mask=inside_C, other=0.0).to(tl.float32)[None, :]
        at_RC = row_R.to(tl.int64)[:, None] * num_outputs + column_C[None, :]
        tl.store(out_TO + at_RC, sum_RC.to(out_TO.dtype.element_ty), mask=inside_R[:, None] & inside_C[None, :])


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, gpu: Multiprocessors) -> Launch:
    """Fill `out_TO`, in its own type, with sums in float32. Rows of both factors take whole multiples of 16 bytes."""
    (num_rows, num_inputs), num_outputs = x_TI.shape, len(weight_OI)
    tiles = tiles_for(num_rows, num_outputs, x_TI.dtype, out_TO.dtype, gpu)
    num_tiles = ceil_div(num_rows, tiles.rows) * ceil_div(num_outputs, tiles.columns)
    factors: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = (x_TI, weight_OI)
    if gpu.bulk_copies:
        x_RI, weight_CI = [tiles.rows, tiles.inputs], [tiles.columns, tiles.inputs]
        factors = TensorDescriptor.from_tensor(x_TI, x_RI), TensorDescriptor.from_tensor(weight_OI, weight_CI)
    return Launch(
        _product_kernel,
        (min(num_tiles, tiles.programs * gpu.count),),
        (*factors, out_TO if bias_O is None else bias_O, out_TO, num_rows, num_inputs, num_outputs),
        {
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "INPUTS": tiles.inputs,
            "BAND": _BAND,
            "BIAS": bias_O is not None,
            "BULK": gpu.bulk_copies,
        },
        tiles.num_warps,
        tiles.num_stages,
    )


def tiles_for(num_rows: int, num_outputs: int, in_dtype: torch.dtype, out_dtype: torch.dtype, gpu: Multiprocessors) -> Tiles:
    """The tiles that are fast for a product of this size. They change no bit of it.

    What is left over when most programs are done costs most: the narrowest tiles are taken that all multiprocessors compute at
    once, else the widest. `engine.gpu_trial` knows at which numbers of rows others are taken.
    """
    if in_dtype == torch.float32:
        return _FLOAT32[num_rows > _FLOAT32[0].rows]
    kinds: tuple[tuple[Tiles, ...], ...] = (_UP_TO_16, _UP_TO_64, _UP_TO_128)
    widths = next((widths for widths in kinds if num_rows <= widths[0].rows), _MORE)
    if out_dtype == torch.float32:
        widths = tuple(tiles for tiles in widths if tiles.columns <= _WIDEST_FLOAT32)
    fitting = [tiles for tiles in (_fitting(tiles, out_dtype.itemsize, gpu) for tiles in widths) if tiles is not None]
    row_tiles = ceil_div(num_rows, fitting[0].rows)
    at_once = (tiles for tiles in fitting if row_tiles * ceil_div(num_outputs, tiles.columns) <= tiles.programs * gpu.count)
    return next(at_once, fitting[-1])


def _fitting(tiles: Tiles, out_bytes: int, gpu: Multiprocessors) -> Tiles | None:
    """The tiles, or shallower ones, whose program has the shared memory for both factors and its result; None if none has."""
    stages = tiles.num_stages if gpu.bulk_copies else tiles.num_stages - 1
    factors = stages * (tiles.rows + tiles.columns) * tiles.inputs * 2
    if factors + tiles.rows * tiles.columns * out_bytes + _BARRIER_BYTES <= gpu.shared_bytes:
        return tiles
    if tiles.inputs > _LEAST_INPUTS:
        return _fitting(replace(tiles, inputs=tiles.inputs // 2), out_bytes, gpu)
    if tiles.num_stages > _LEAST_STAGES:
        return _fitting(replace(tiles, num_stages=tiles.num_stages - 1), out_bytes, gpu)
    return None


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """Return what a GPU has; on another device, where an interpreter computes, what an H100 has."""
    if device.type != "cuda":
        return H100
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack it
    return Multiprocessors(gpu.multi_processor_count, shared_bytes, bulk_copies=gpu.major >= 9)


class GpuLinear:
    """`engine.models.decoder.Product` of a weight in a GPU's memory."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O], in the weight's type."""
        return self._product(x_TI, self._weight_OI.dtype)

    def logits(self, x_TI: Tensor) -> Tensor:
        """Return the product of [T, I] as float32 logits [T, O]."""
        return self._product(x_TI, torch.float32)

    def _product(self, x_TI: Tensor, dtype: torch.dtype) -> Tensor:
        out_TO = torch.empty((len(x_TI), len(self._weight_OI)), dtype=dtype, device=x_TI.device)
        product(x_TI, self._weight_OI, self._bias_O, out_TO, multiprocessors(x_TI.device)).run()
        return out_TO
