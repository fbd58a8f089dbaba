"""Weights of four or eight bits with a scale and a minimum per 32 inputs, as in ggml's Q4_0, Q4_1 and Q8_0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale and a minimum."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix as `values * scale + minimum`."""

    values_OI: Tensor
    """uint8 from 0 to 15, or int8."""
    scales_OG: Tensor
    """float16, one for each of the G groups of a row."""
    minimums_OG: Tensor
    """Minimum of each group, in float16."""

    def __post_init__(self) -> None:
        outputs, inputs = self.values_OI.shape
        assert inputs % GROUP == 0, f"{inputs} inputs are no whole groups"
        assert self.scales_OG.shape == self.minimums_OG.shape == (outputs, inputs // GROUP), "one scale per group"
        assert self.scales_OG.dtype == self.minimums_OG.dtype == torch.float16, "scales are kept as they are stored"

    @classmethod
    def stack(cls, parts: list[QuantizedWeight]) -> QuantizedWeight:
        """The outputs of all parts, in order."""
        return cls(
            torch.cat([part.values_OI for part in parts]),
            torch.cat([part.scales_OG for part in parts]),
            torch.cat([part.minimums_OG for part in parts]),
        )

    @property
    def bits(self) -> int:
        return 8 if self.values_OI.dtype == torch.int8 else 4

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[O, I], computed in float32."""
        grouped = self.values_OI.float().view(*self.scales_OG.shape, GROUP)
        dense = grouped.mul_(self.scales_OG.float()[..., None]).add_(self.minimums_OG.float()[..., None])
        return dense.view(self.values_OI.shape).to(dtype)


def quantize(weight_OI: Tensor, bits: int) -> QuantizedWeight:
    """The nearest values, by the rules of Q8_0 (symmetric about 0) and Q4_1 (from the group's least to its greatest).

    A scale too small for float16 becomes 0, and with it the group's differences.
    """
    grouped = weight_OI.float().view(len(weight_OI), -1, GROUP)
    least, greatest = grouped.aminmax(dim=-1)
    if bits == 8:
        scales = (torch.maximum(greatest, -least) / 127).half()
        minimums, lowest, highest, dtype = torch.zeros_like(scales), -127, 127, torch.int8
    else:
        scales = ((greatest - least) / 15).half()
        minimums, lowest, highest, dtype = least.half(), 0, 15, torch.uint8
    steps = (grouped - minimums.float()[..., None]) / scales.float()[..., None]
    values = steps.nan_to_num(0.0).round_().clamp_(lowest, highest).to(dtype)
    return QuantizedWeight(values.view(weight_OI.shape), scales, minimums)
