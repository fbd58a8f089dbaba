"""The blocks of a KV pool as bytes in the processor's memory, for files of a tier.

    make_ready ──┬──► outgoing(block) ──► its bytes, to be written
                 └──► incoming(block) ──► room for its bytes ──► whoever filled it calls `filled`

A pool in the processor's memory is read and written in place. One on a GPU goes through a block of pinned host memory, which a
copy engine reaches without a second copy. Its copies have a stream of their own: on the engine's, each block would wait for
all steps that are launched. Each object is used from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class PoolBlocks(Protocol):
    """The blocks of one pool."""

    block_bytes: int

    def make_ready(self) -> None:
        """Have what follows wait for what the engine has launched: it may still write the blocks. Called before some blocks."""

    def outgoing(self, block: int) -> Sequence[memoryview]:
        """The bytes of a block that nobody writes: in each layer K, then V. Valid until the next call."""

    def incoming(self, block: int) -> Sequence[memoryview]:
        """Where the bytes of a block of the caller's own are to be put. Valid until the next call."""

    def filled(self, block: int) -> None:
        """Tell that they are there: the pool has them when this returns."""


def pool_blocks(pool: Tensor) -> PoolBlocks:
    """The blocks of a pool [layers, 2 (K, V), blocks, block size, KV heads, head size]."""
    return CpuBlocks(pool) if pool.device.type == "cpu" else StagedBlocks(pool)


class CpuBlocks:
    """The blocks of a pool in the processor's memory, in place."""

    def __init__(self, pool: Tensor) -> None:
        halves = pool.flatten(0, 1).flatten(2).view(torch.uint8).numpy()
        self._halves: list[np.ndarray] = list(halves)
        """For each layer K, then V: uint8 [blocks, bytes]."""
        self.block_bytes = len(halves) * halves.shape[2]

    def make_ready(self) -> None:
        """Do nothing: the engine's steps have ended when the host hears of them."""

    def outgoing(self, block: int) -> Sequence[memoryview]:
        """The bytes of a block that nobody writes."""
        return [half[block].data for half in self._halves]

    incoming = outgoing

    def filled(self, block: int) -> None:
        """Do nothing: the bytes were read straight into the pool."""


class StagedBlocks:
    """The blocks of a pool in the memory of a GPU, one at a time in pinned memory."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        """That of the copies; None in a test, where staged blocks are in the processor's memory."""
        self._staging = torch.empty_like(pool[:, :, 0], device="cpu", pin_memory=pool.device.type == "cuda")
        staging: np.ndarray = self._staging.flatten().view(torch.uint8).numpy()
        self._bytes = staging.data
        self.block_bytes = self._bytes.nbytes

    def make_ready(self) -> None:
        """Have the copies that follow wait for what the device's default stream, the engine's, has been told to do before."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))

    def outgoing(self, block: int) -> Sequence[memoryview]:
        """A copy of the block, which is complete."""
        with torch.cuda.stream(self._stream):
            self._staging.copy_(self._pool[:, :, block])
        return [self._bytes]

    def incoming(self, block: int) -> Sequence[memoryview]:
        """Return the staging memory that the block's bytes are read into."""
        return [self._bytes]

    def filled(self, block: int) -> None:
        """Copy the staging memory to the block, and wait for it: a lane may read it from a stream of its own next."""
        with torch.cuda.stream(self._stream):
            self._pool[:, :, block].copy_(self._staging)
        if self._stream is not None:
            self._stream.synchronize()
