"""The sum over the layers with its norm, and the gated activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.kernels.triton.launch import Launch, power_of_two

_ELEMENTS_PER_WARP = 512
_SWIGLU_COLUMNS = 1024
_ADDED_ELEMENTS = 1024


@triton.jit
def _add_norm_kernel(
    x_TD: tl.tensor,
    delta_TD: tl.tensor,
    weight_D: tl.tensor,
    out_TD: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """One row."""
    column_D = tl.arange(0, PADDED)
    inside_D = column_D < WIDTH
    at_D = tl.program_id(0).to(tl.int64) * WIDTH + column_D
    x_D = tl.load(x_TD + at_D, mask=inside_D, other=0.0)
    if ADD:
        x_D += tl.load(delta_TD + at_D, mask=inside_D, other=0.0).to(tl.float32)
        tl.store(x_TD + at_D, x_D, mask=inside_D)
    scale = tl.rsqrt(tl.sum(x_D * x_D, axis=0) / WIDTH + eps)
    weight = tl.load(weight_D + column_D, mask=inside_D, other=0.0).to(tl.float32)
    tl.store(out_TD + at_D, (x_D * scale * weight).to(out_TD.dtype.element_ty), mask=inside_D)


@triton.jit
def _swiglu_kernel(gate_up_TI: tl.tensor, out_TI: tl.tensor, WIDTH: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """Some columns of one row."""
    row, column_I = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_I = column_I < WIDTH
    gate_at_I = row * (2 * WIDTH) + column_I
    gate_I = tl.load(gate_up_TI + gate_at_I, mask=inside_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up_TI + gate_at_I + WIDTH, mask=inside_I, other=0.0).to(tl.float32)
    product_I = gate_I / (1 + tl.exp(-gate_I)) * up_I
    tl.store(out_TI + row * WIDTH + column_I, product_I.to(out_TI.dtype.element_ty), mask=inside_I)


@triton.jit(do_not_specialize=["count"])
def _add_parts_kernel(
    parts_ZE: tl.tensor, out_E: tl.tensor, count: tl.tensor, PARTS: tl.constexpr, ELEMENTS: tl.constexpr
) -> None:
    """Some values."""
    at_E = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside_E = at_E < count
    total_E = tl.load(parts_ZE + at_E, mask=inside_E, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total_E += tl.load(parts_ZE + part * count.to(tl.int64) + at_E, mask=inside_E, other=0.0).to(tl.float32)
    tl.store(out_E + at_E, total_E.to(out_E.dtype.element_ty), mask=inside_E)


def add_parts(parts_ZE: Tensor, out_E: Tensor) -> Launch:
    """Add up Z parts in their order, in float32, and round once. `out_E` may be the first part."""
    num_parts, count = parts_ZE.shape
    constants = {"PARTS": num_parts, "ELEMENTS": _ADDED_ELEMENTS}
    return Launch(_add_parts_kernel, (ceil_div(count, _ADDED_ELEMENTS),), (parts_ZE, out_E, count), constants, num_warps=4)


def add_norm(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, out_TD: Tensor) -> Launch:
    """Add `delta_TD` to the float32 `x_TD` in place; `out_TD` is the sum's RMS norm in the weight's dtype."""
    num_rows, width = x_TD.shape
    padded = power_of_two(width)
    num_warps = min(max(padded // _ELEMENTS_PER_WARP, 1), 16)
    args = (x_TD, out_TD if delta_TD is None else delta_TD, weight_D, out_TD, eps)
    constants = {"WIDTH": width, "PADDED": padded, "ADD": delta_TD is not None}
    return Launch(_add_norm_kernel, (num_rows,), args, constants, num_warps)


def swiglu(gate_up_TI: Tensor, out_TI: Tensor) -> Launch:
    """`silu(gate) * up`, where the first half of the columns is the gate: [T, 2 I] to [T, I]."""
    num_rows, width = out_TI.shape
    grid = (num_rows, ceil_div(width, _SWIGLU_COLUMNS))
    constants = {"WIDTH": width, "COLUMNS": _SWIGLU_COLUMNS}
    return Launch(_swiglu_kernel, grid, (gate_up_TI, out_TI), constants, num_warps=4)
