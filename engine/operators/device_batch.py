"""A batch's integers in device memory, where kernels read them.

What launches are made for, and a CUDA graph is captured for, is the shape alone. It may be larger than a batch: what is left
over are single tokens of length 0 in no slot, which kernels skip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.batch import ForwardBatch
from engine.kernels.pinned import sendable

_ALIGNED = 4
"""int32 numbers in 16 bytes: Triton compiles a kernel again for a pointer that is aligned otherwise."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes of everything that a launch is made for."""

    num_longer: int
    """Number of chunks of several tokens."""
    num_longer_rows: int
    num_tiles: int
    """Number of tiles that `engine.kernels.triton.prefill_attention.prefill_tiles` cuts the attention of these chunks into."""
    num_singles: int
    """Chunks of one token, whose rows come last."""
    table_width: int
    """Blocks of the longest context."""

    @property
    def num_rows(self) -> int:
        return self.num_longer_rows + self.num_singles

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each array that is sent to the device in one copy."""
        return {
            "token_ids_T": (self.num_rows,),
            "positions_T": (self.num_rows,),
            "slots_T": (self.num_rows,),
            "tiles_P4": (self.num_tiles, 4),
            "lengths_R": (self.num_singles,),
        }


class DeviceBatch:
    """The memory of one shape. Its tensors stay where they are; they hold the last batch, at first an empty one."""

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self.shape = shape
        sizes = {name: _aligned(math.prod(part)) for name, part in shape.parts().items()}
        self._numbers = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self._ranges = {name: slice(begin, begin + math.prod(shape.parts()[name])) for name, begin in begins.items()}
        self.token_ids_T = self._part("token_ids_T")
        self.positions_T = self._part("positions_T")
        self.slots_T = self._part("slots_T").fill_(-1)
        """Negative where a token has none."""
        self.tiles_P4 = self._part("tiles_P4")
        self.lengths_R = self._part("lengths_R")
        """Of the contexts of single tokens, themselves included; 0 where there is none."""
        width = _aligned(shape.table_width)
        self.longer_tables_CW = torch.zeros((shape.num_longer, width), dtype=torch.int32, device=device)
        self.single_tables_RW = torch.zeros((shape.num_singles, width), dtype=torch.int32, device=device)
        """Both hold any block behind a context."""

    def fill(self, batch: ForwardBatch, tiles_P4: npt.NDArray[np.int64]) -> None:
        """Send a batch. The host does not wait for its arrival; work of this stream that comes later sees it."""
        longer, device = batch.num_longer, self._numbers.device
        assert (longer, len(tiles_P4)) == (self.shape.num_longer, self.shape.num_tiles), "a batch of another shape"
        assert len(batch.token_ids_T) <= self.shape.num_rows, "a batch of more tokens"
        packed = np.zeros(len(self._numbers), dtype=np.int32)
        packed[self._ranges["slots_T"]] = -1
        for name, values in {
            "token_ids_T": batch.token_ids_T,
            "positions_T": batch.positions_T,
            "slots_T": batch.slots_T,
            "tiles_P4": tiles_P4.reshape(-1),
            "lengths_R": batch.ends_C[longer:],
        }.items():
            packed[self._ranges[name]][: len(values)] = values
        self._numbers.copy_(sendable(torch.from_numpy(packed), device), non_blocking=True)
        for tables, into in (
            (batch.tables_CW[:longer], self.longer_tables_CW),
            (batch.tables_CW[longer:], self.single_tables_RW),
        ):
            if not len(tables):
                continue
            used = into[: tables.shape[0], : tables.shape[1]]
            used.copy_(sendable(torch.from_numpy(tables.astype(np.int32)), device), non_blocking=True)

    def _part(self, name: str) -> Tensor:
        return self._numbers[self._ranges[name]].view(self.shape.parts()[name])


def _aligned(size: int) -> int:
    return ceil_div(size, _ALIGNED) * _ALIGNED
