"""Matrix products with weights of four bits, for few rows: reading the weights is what such a product costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale and a minimum, as in ggml's Q4_0 and Q4_1."""
_OUTPUT_MULTIPLE = 16
"""torch packs this many output rows together."""


@dataclass(frozen=True)
class Int4Weight:
    """A matrix as it is stored: scale * value + minimum."""

    values_OI: Tensor
    """uint8, 0 to 15."""
    scales_OG: Tensor
    """float32, one for each of the G groups of a row."""
    minimums_OG: Tensor

    def __post_init__(self) -> None:
        outputs, inputs = self.values_OI.shape
        assert inputs % GROUP == 0, f"{inputs} inputs are no whole groups"
        assert self.scales_OG.shape == self.minimums_OG.shape == (outputs, inputs // GROUP), "one scale per group"

    @classmethod
    def stack(cls, parts: list[Int4Weight]) -> Int4Weight:
        """The outputs of all parts, in order."""
        return cls(
            torch.cat([part.values_OI for part in parts]),
            torch.cat([part.scales_OG for part in parts]),
            torch.cat([part.minimums_OG for part in parts]),
        )

    @property
    def can_pack(self) -> bool:
        return len(self.values_OI) % _OUTPUT_MULTIPLE == 0


class Int4Matrix:
    """`y = x Wᵀ` in bfloat16, by torch's CPU kernel. The quantized values are kept; scales are rounded to bfloat16.

    The kernel takes weights as `(value - 8) * scale + zero`, so zero is `minimum + 8 * scale`. A row's result has the same
    bits at any number of rows.
    """

    def __init__(self, weight: Int4Weight) -> None:
        assert weight.can_pack, f"{len(weight.values_OI)} outputs do not divide by {_OUTPUT_MULTIPLE}"
        inner_tiles = 1  # required by the operator, meaningless on CPUs
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values_OI.int(), inner_tiles)
        zeros_OG = weight.minimums_OG + 8 * weight.scales_OG
        self._scales_and_zeros = torch.stack((weight.scales_OG.T, zeros_OG.T), dim=-1).bfloat16().contiguous()

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        y_TO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, self._packed, GROUP, self._scales_and_zeros)
        return y_TO
