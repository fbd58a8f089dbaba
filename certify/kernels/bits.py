"""Products on a GPU, and what shall have the same bits: a row in any company, a token as part of a prompt and as an answer.

Bits are compared on a GPU only: what Triton's interpreter multiplies has other bits in other shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from certify.kernels.cases import (
    DEVICE,
    Heads,
    PagedContexts,
    expect,
    relative_error,
    run_decode_attention,
    run_prefill_attention,
)
from engine.kernels.triton.product import GpuLinear

ROWS_TRIED = (1, 2, 16, 17, 41, 64, 65, 128, 129, 512, 2048)
"""Numbers of rows whose products are compared."""


def product_error(num_rows: int, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> float:
    """Return the larger relative error of a product in its factors' type and of one in float32."""
    x_TI, weight_OI = _factors(num_rows, inputs, outputs, dtype)
    bias_O = torch.randn(outputs).to(DEVICE, dtype) if bias else None
    linear = GpuLinear(weight_OI, bias_O)
    expected = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
    return max(relative_error(linear(x_TI), expected.cpu()), relative_error(linear.logits(x_TI), expected.cpu()))


def check_rows_keep_their_bits(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Compare rows of products with few rows and with many, whose neighbours are no numbers.

    Raises WrongResultError if one has other bits than alone.
    """
    x_TI, weight_OI = _factors(max(ROWS_TRIED), inputs, outputs, dtype)
    linear = GpuLinear(weight_OI)
    kept = [0, 1, 7, 15, 16, 40, 63, 64, 127, 128, 300, max(ROWS_TRIED) - 1]
    alone = {row: linear.logits(x_TI[row : row + 1]) for row in kept}
    others_T = torch.ones(len(x_TI), dtype=torch.bool, device=DEVICE)
    others_T[kept] = False
    x_TI[others_T] = math.nan
    for rows in ROWS_TRIED:
        together = linear.logits(x_TI[:rows])
        for row in kept:
            if row < rows:
                expect(torch.equal(alone[row][0], together[row]), f"row {row} has other bits among {rows} rows than alone")


def check_prompt_as_answer(
    heads: Heads, positions: Sequence[int], block_size: int, dtype: torch.dtype, window: int = 0
) -> None:
    """Compare the tokens at these positions of a prompt, as part of it, in short chunks, and as answers.

    Raises WrongResultError if one has other bits.
    """
    length = max(positions) + 1
    contexts = PagedContexts(heads, [length], block_size, dtype, window)
    qkv_TA, _ = contexts.queries(length, dtype)

    def prompt(start: int, end: int) -> Tensor:
        out_TNH = torch.empty((end - start, heads.query, heads.size), dtype=dtype, device=DEVICE)
        run_prefill_attention(contexts, [(start, end)], block_size, qkv_TA[start:end].clone(), out_TNH)
        return out_TNH

    whole = prompt(0, length)
    for position in positions:
        first = max(0, position - 37)
        answer = torch.empty((1, heads.query, heads.size), dtype=dtype, device=DEVICE)
        run_decode_attention(contexts, slice(None), [position + 1], block_size, qkv_TA[position : position + 1], answer)
        expect(torch.equal(answer[0], whole[position]), f"position {position} has other bits as an answer")
        expect(torch.equal(prompt(first, position + 1)[-1], whole[position]), f"position {position} has other bits in a chunk")


def _factors(num_rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random rows [T, I] and weights [O, I] on the device."""
    weight_OI = torch.randn(outputs, inputs) / math.sqrt(inputs)
    return torch.randn(num_rows, inputs).to(DEVICE, dtype), weight_OI.to(DEVICE, dtype)
