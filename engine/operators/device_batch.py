"""A batch's integers in device memory, where kernels read them: one buffer, filled by one copy.

What launches are made for, and a CUDA graph is captured for, is the shape alone. A buffer may be larger than the batch: what
is left over are single tokens of length 0 in no slot, which kernels skip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import ForwardBatch

_ALIGNED = 4
"""int32 numbers in 16 bytes: Triton compiles a kernel again for a pointer that is aligned otherwise."""

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BatchShape:
    """Sizes of everything that a launch is made for."""

    num_longer: int
    """Chunks of several tokens."""
    num_longer_rows: int
    num_tiles: int
    """Of their attention, as `engine.kernels.triton.prefill_attention.prefill_tiles` cuts them."""
    num_singles: int
    """Chunks of one token, whose rows come last."""
    table_width: int
    """Blocks of the longest context."""

    @property
    def num_rows(self) -> int:
        return self.num_longer_rows + self.num_singles

    def parts(self) -> dict[str, tuple[int, ...]]:
        width = -(-self.table_width // _ALIGNED) * _ALIGNED
        return {
            "positions_T": (self.num_rows,),
            "slots_T": (self.num_rows,),
            "tiles_P4": (self.num_tiles, 4),
            "longer_tables_CW": (self.num_longer, width),
            "lengths_R": (self.num_singles,),
            "single_tables_RW": (self.num_singles, width),
        }


class DeviceBatch:
    """The buffer of one shape. Its tensors stay where they are; they hold the last batch, at first an empty one."""

    def __init__(self, shape: BatchShape, device: torch.device) -> None:
        self.shape = shape
        sizes = {name: -(-math.prod(part) // _ALIGNED) * _ALIGNED for name, part in shape.parts().items()}
        self._buffer = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self._ranges = {name: slice(begin, begin + math.prod(shape.parts()[name])) for name, begin in begins.items()}
        self.positions_T = self._part("positions_T")
        self.slots_T = self._part("slots_T").fill_(-1)
        """Negative where a token has none."""
        self.tiles_P4 = self._part("tiles_P4")
        self.longer_tables_CW = self._part("longer_tables_CW")
        self.lengths_R = self._part("lengths_R")
        """Of the contexts of single tokens, themselves included; 0 where there is none."""
        self.single_tables_RW = self._part("single_tables_RW")

    def fill(self, batch: ForwardBatch, tiles_P4: npt.NDArray[np.int64]) -> None:
        """Send a batch. The host does not wait for its arrival; work of this stream that comes later sees it."""
        longer, width = batch.num_longer, batch.tables_CW.shape[1]
        assert (longer, len(tiles_P4)) == (self.shape.num_longer, self.shape.num_tiles), "a batch of another shape"
        assert len(batch.token_ids_T) <= self.shape.num_rows, "a batch of more tokens"
        packed = np.zeros(len(self._buffer), dtype=np.int32)
        packed[self._ranges["slots_T"]] = -1
        for name, values in {
            "positions_T": batch.positions_T,
            "slots_T": batch.slots_T,
            "tiles_P4": tiles_P4.reshape(-1),
            "lengths_R": batch.ends_C[longer:],
        }.items():
            packed[self._ranges[name]][: len(values)] = values
        for name, tables in (("longer_tables_CW", batch.tables_CW[:longer]), ("single_tables_RW", batch.tables_CW[longer:])):
            packed[self._ranges[name]].reshape(self.shape.parts()[name])[: len(tables), :width] = tables
        host = torch.from_numpy(packed)
        # torch keeps pinned memory from being used again before the copy is done.
        self._buffer.copy_(host.pin_memory() if self._buffer.is_cuda else host, non_blocking=True)

    def _part(self, name: str) -> Tensor:
        return self._buffer[self._ranges[name]].view(self.shape.parts()[name])
