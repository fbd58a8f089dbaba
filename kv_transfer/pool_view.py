"""A KV pool as the handoff sees it: layers of slots, as tensors and, in the processor's memory, as bytes; and places in it.

What a view has of its device (`begin_thread`, `make_ready`, `settle`) is called from the lane's one thread.

Shapes: L layers, 2 (K and V), S slots of the pool, T tokens. A row is one token's K or V in one layer, of the heads that are
looked at: all of the rank's, or those that travel on one lane (`kv_transfer.shards`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.kv_cache import gather_tokens, scatter_tokens
from engine.kernels.pinned import sent
from kv_transfer.plan import MIN_MESSAGE_BYTES, SlotRun

ByteArray = npt.NDArray[np.uint8]


_CPU = torch.device("cpu")


class Slots:
    """Where the T tokens of a push, of one or more transfers, lie in a pool on `device`."""

    def __init__(self, runs: Sequence[SlotRun], device: torch.device = _CPU) -> None:
        self.runs = runs
        self._device = device

    def __len__(self) -> int:
        return sum(run.length for run in self.runs)

    @cached_property
    def ids_T(self) -> Tensor:
        """int64 [T], on the pool's device, for what the calling thread launches there."""
        ids = [np.arange(run.start, run.start + run.length) for run in self.runs]
        return sent(torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *ids])), self._device)


class PoolView:
    """Some heads of a KV pool, as a lane reads or writes them.

    `layers` are the pool's, each [2 (K, V), S slots, KV heads, head size], contiguous. `heads` are those that are looked at;
    None means all. This class knows the pool as tensors; `lanes.view_of` makes the one that fits the memory in which a pool
    lies.
    """

    def __init__(self, layers: Sequence[Tensor], heads: range | None = None) -> None:
        _, self.num_slots, num_heads, head_dim = layers[0].shape
        heads = range(num_heads) if heads is None else heads
        head_bytes = head_dim * layers[0].element_size()
        self.device = layers[0].device
        self.layers = [layer[:, :, heads.start : heads.stop] for layer in layers]
        self.stride_bytes = num_heads * head_bytes
        """From one slot's row to the next."""
        self.first_byte = heads.start * head_bytes
        """Where in its slot a row begins."""
        self.row_bytes = len(heads) * head_bytes

    least_message_bytes = MIN_MESSAGE_BYTES
    """A message of fewer bytes costs more than it brings (`plan.layer_groups`)."""

    most_messages: int | None = None
    """Most messages of one push; None if there is no limit."""

    @property
    def layer_bytes(self) -> int:
        """Bytes that the K and V of one token take in one layer."""
        return 2 * self.row_bytes

    def compile(self) -> None:
        """Compile what lanes of workers that are alike will launch, so that no request waits for it."""

    def begin_thread(self) -> None:
        """Prepare the calling thread, which will move this pool's bytes. Called once."""

    def end_thread(self) -> None:
        """Give back what that thread has of its device, when nothing moves this pool's bytes any more. Idempotent."""

    def make_ready(self, slots: Slots) -> None:
        """Prepare slots that belong to the caller for being written."""

    def settle(self) -> None:
        """Wait until the calling thread's work is done, and with it all that this work waits for."""

    def gather(self, layers: range, slots: Slots, into_L2THD: Tensor) -> None:
        """Copy these slots of some layers into a dense buffer, contiguous and of the pool's dtype."""
        for layer, into_2THD in zip(layers, into_L2THD, strict=True):
            gather_tokens(self.layers[layer], slots.ids_T, into_2THD)

    def scatter(self, layers: range, slots: Slots, from_L2THD: Tensor) -> None:
        """Copy a dense buffer, contiguous and of the pool's dtype, into these slots of some layers."""
        for layer, from_2THD in zip(layers, from_L2THD, strict=True):
            scatter_tokens(self.layers[layer], slots.ids_T, from_2THD)

    def copy_in(self, source_layers: Sequence[Tensor], source_T: Tensor, layers: range, slots: Slots) -> None:
        """Copy tokens of another pool, which this one's device can read, into these slots of some layers.

        `source_layers` are all of that pool, each [2 (K, V), slots, KV heads, head size], and `source_T` its slots, int64 [T].
        """
        for layer in layers:
            self.layers[layer][:, slots.ids_T] = source_layers[layer][:, source_T]


class CpuPoolView(PoolView):
    """Some heads of a KV pool in the processor's memory, which can be read as bytes too."""

    def __init__(self, layers: Sequence[Tensor], heads: range | None = None) -> None:
        super().__init__(layers, heads)
        self.whole_rows = self.row_bytes == self.stride_bytes
        slots = [layer.flatten(2).view(torch.uint8).numpy() for layer in layers]
        self.rows: list[ByteArray] = [each[:, :, self.first_byte : self.first_byte + self.row_bytes] for each in slots]
        """Each layer as uint8 [2, S, row bytes]."""
        self._bytes = [each.data.cast("B") for each in slots]

    def begin_thread(self) -> None:
        """Have torch compute with the calling thread alone, here.

        OpenMP keeps helpers for each thread that torch splits a copy in. Those of a lane would be more than there are cores,
        together with those that compute steps, and all of them would sleep between any two loops of a step.
        """
        torch.get_num_threads()  # torch sets the number in each thread that asks for the first time
        with suppress(OSError):  # where torch was built with another OpenMP
            ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)

    def halves(self, layer: int, slots: Sequence[slice]) -> Iterator[memoryview]:
        """K and then V of one layer as flat bytes: those of the whole pool if its rows are whole, else of these slots alone."""
        if self.whole_rows:
            half = len(self._bytes[layer]) // 2
            yield self._bytes[layer][:half]
            yield self._bytes[layer][half:]
        else:
            for rows in self.rows[layer]:
                yield np.concatenate([rows[each] for each in slots]).data.cast("B")
