"""One launch of a kernel, as a value: to be run, or to be compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that it is launched with."""

    kernel: Any
    """The kernel, as `triton.jit` returned it."""
    grid: tuple[int, ...]
    args: tuple[Tensor | TensorDescriptor | int | float, ...]
    """Arguments in the order of the kernel's parameters. Its constants follow them."""
    constants: Mapping[str, int | float | bool]
    num_warps: int
    num_stages: int = 1

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told, a multiply-add may be rounded once among it."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def power_of_two(at_least: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (at_least - 1).bit_length()
