"""A KV pool as the handoff sees it: layers of slots, as tensors and as bytes, and places in it.

Shapes: L layers, 2 (K and V), S slots of the pool, T tokens. A row is one token's K or V in one layer, of the heads that are
looked at: all of the rank's, or those that travel on one lane (`kv_transfer.shards`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """`layers`: each [2, S, KV heads, head size], contiguous, on the CPU. `heads`: those that are looked at; None means all."""

    def __init__(self, layers: Sequence[Tensor], heads: range | None = None) -> None:
        _, self.num_slots, num_heads, head_dim = layers[0].shape
        heads = range(num_heads) if heads is None else heads
        head_bytes = head_dim * layers[0].element_size()
        self.layers = [layer[:, :, heads.start : heads.stop] for layer in layers]
        self.stride_bytes = num_heads * head_bytes
        """From one slot's row to the next."""
        self.first_byte = heads.start * head_bytes
        """Where in its slot a row begins."""
        self.row_bytes = len(heads) * head_bytes
        self.whole_rows = self.row_bytes == self.stride_bytes
        slots = [layer.flatten(2).view(torch.uint8).numpy() for layer in layers]
        self.rows: list[ByteArray] = [each[:, :, self.first_byte : self.first_byte + self.row_bytes] for each in slots]
        """Each layer as uint8 [2, S, row bytes]."""
        self._bytes = [each.data.cast("B") for each in slots]
        self._touched = np.zeros(self.num_slots, dtype=np.bool_)

    @property
    def layer_bytes(self) -> int:
        """Of one token's K and V in one layer."""
        return 2 * self.row_bytes

    def halves(self, layer: int, slots: Sequence[slice]) -> Iterator[memoryview]:
        """K and then V of one layer as flat bytes: of the whole pool if its rows are whole, else of these slots alone."""
        if self.whole_rows:
            half = len(self._bytes[layer]) // 2
            yield self._bytes[layer][:half]
            yield self._bytes[layer][half:]
        else:
            for rows in self.rows[layer]:
                yield np.concatenate([rows[each] for each in slots]).data.cast("B")

    def touch(self, slots: Slots) -> None:
        """Have the memory of slots that are about to be filled mapped, where this was not done before.

        The first write to a page costs up to 15 µs, so 1,024 tokens of the default model 100 ms; the copy into mapped pages
        takes 1. The rows must belong to the caller: this writes a byte to each of their pages.
        """
        step = max(1, _PAGE_BYTES // self.stride_bytes)
        for start, count in slots.runs:
            if self._touched[start : start + count].all():
                continue
            self._touched[start : start + count] = True
            for rows in self.rows:
                rows[:, start : start + count : step, ::_PAGE_BYTES] = 0
                rows[:, start + count - 1, -1] = 0
