"""A KV pool as the handoff sees it: layers of slots, as tensors and as bytes, and places in it.

Shapes: L layers, 2 (K and V), S slots of the pool, T tokens. A row is one token's K or V in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_transfer.plan import SlotRun

_PAGE_BYTES = 4096

ByteArray = npt.NDArray[np.uint8]


class Slots:
    """Where the T tokens of a push, of one or more transfers, lie in a pool."""

    def __init__(self, runs: Sequence[SlotRun]) -> None:
        self.runs = runs

    def __len__(self) -> int:
        return sum(run.length for run in self.runs)

    @cached_property
    def ids_T(self) -> Tensor:
        """int64 [T]"""
        return torch.cat([torch.arange(run.start, run.start + run.length) for run in self.runs])


class PoolView:
    """One per worker. `layers`: each [2, S, KV heads, head size], contiguous, on the CPU."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.layers = layers
        self.rows: list[ByteArray] = [layer.flatten(2).view(torch.uint8).numpy() for layer in layers]
        """Each layer as uint8 [2, S, row bytes]."""
        self.bytes: list[memoryview] = [rows.data.cast("B") for rows in self.rows]
        """Each layer as flat bytes."""
        _, self.num_slots, self.row_bytes = self.rows[0].shape
        self._touched = np.zeros(self.num_slots, dtype=np.bool_)

    def touch(self, slots: Slots) -> None:
        """Have the memory of slots that are about to be filled mapped, where this was not done before.

        The first write to a page costs up to 15 µs, so 1,024 tokens of the default model 100 ms; the copy into mapped pages
        takes 1. The slots must belong to the caller: this writes a byte to each page.
        """
        for start, count in slots.runs:
            if self._touched[start : start + count].all():
                continue
            self._touched[start : start + count] = True
            for rows in self.rows:
                run = rows[:, start : start + count].reshape(2, -1)
                run[:, ::_PAGE_BYTES] = 0
                run[:, -1] = 0
