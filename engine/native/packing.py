"""How matrices lie in memory for the native products: dense ones in blocks of columns, quantized ones in records.

The compiled code reads what is packed here (products.cpp and record.h of each instruction set).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.quantized import GROUP

COLUMNS = 64
"""Outputs that a dense matrix packs together."""
OUTPUT_MULTIPLE = 16
"""Outputs that a quantized matrix packs together."""


def pack_dense(weight_OI: Tensor) -> Tensor:
    """A matrix as products.cpp reads it: bfloat16 as [O / 64, I / 2, 64, 2], float32 as [O / 16, I, 16]. O divides by 64."""
    outputs, inputs = weight_OI.shape
    if weight_OI.dtype == torch.float32:
        return weight_OI.view(outputs // OUTPUT_MULTIPLE, OUTPUT_MULTIPLE, inputs).transpose(1, 2).contiguous()
    return weight_OI.view(outputs // COLUMNS, COLUMNS, inputs // 2, 2).transpose(1, 2).contiguous()


def can_pack(values_OI: Tensor) -> bool:
    """Whether a matrix can be packed: whether its outputs and inputs divide into whole records."""
    outputs, inputs = values_OI.shape
    return outputs % OUTPUT_MULTIPLE == 0 and inputs % GROUP == 0


def pack_quantized(values_OI: Tensor, scales_OG: Tensor, minimums_OG: Tensor, bits: int, *, records_by_output: bool) -> Tensor:
    """The records that products.cpp reads, [O / 16, I / 32, bytes], in either of two orders, which a record.h describes each.

    Values: 0 to 15, or int8; scales and minimums: float16.
    """
    blocks, groups = len(values_OI) // OUTPUT_MULTIPLE, scales_OG.shape[1]
    grouped = values_OI.view(torch.uint8).view(blocks, OUTPUT_MULTIPLE, groups, GROUP).transpose(1, 2)
    values = (_by_output if records_by_output else _by_pair)(grouped, bits).reshape(blocks, groups, -1)
    numbers = (
        each.view(blocks, OUTPUT_MULTIPLE, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for each in (scales_OG, minimums_OG)
    )
    return torch.cat((*numbers, values), dim=-1)


def _by_pair(values_BGOI: Tensor, bits: int) -> Tensor:
    """Return all records' values in the order of scalar/record.h, by pairs of inputs: uint8 [B, G, words, O, 4].

    B is blocks of O = 16 outputs, G groups of I = 32 inputs.
    """
    per_word = 16 // bits
    pairs = values_BGOI.unflatten(3, (-1, per_word, 2)).permute(0, 1, 3, 4, 2, 5)
    return _words(pairs.to(torch.int16).unbind(3), bits)


def _by_output(values_BGOI: Tensor, bits: int) -> Tensor:
    """Return all records' values in the order of amx/record.h, by outputs: uint8 [B, G, O, I].

    In four bits it is [B, G, O / 4, 2 I]. B is blocks of O = 16 outputs, G groups of I = 32 inputs.
    """
    if bits == 8:
        return values_BGOI.contiguous()
    return _words(values_BGOI.to(torch.int16).unflatten(2, (-1, 4)).unbind(3), bits)


def _words(parts: Sequence[Tensor], bits: int) -> Tensor:
    """The bytes of words that have a value of each of the parts, that of the first one lowest."""
    words = parts[0]
    for place, part in enumerate(parts[1:], start=1):
        words = words | part << (bits * place)
    return words.contiguous().view(torch.uint8)
