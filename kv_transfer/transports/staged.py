"""Layer chunks over anything that moves bytes: gather into a staging buffer, move, scatter from a staging buffer.

The buffers lie where the pool does, and live as long as the channel: on the CPU the faults of fresh pages cost more than the
copy itself. On a GPU all of it happens in the order of the calling thread's stream.
A chunk is [layers, 2 (K, V), tokens, kv heads, head dim].
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.pool_view import PoolView, Slots


class BytePipe(Protocol):
    """One direction of a connection that carries bytes. Both calls block until the buffer may be used again, and raise
    TransportError.
    """

    def send(self, payload: Tensor) -> None:
        """Send `payload`: uint8 [n], contiguous."""

    def receive(self, into: Tensor) -> None:
        """Fill `into`: uint8 [n], contiguous."""

    def interrupt(self) -> None:
        """Have a call of another thread raise TransportError soon."""

    def close(self) -> None:
        """End the connection."""


class _Staging:
    """A buffer that grows to the largest chunk seen."""

    def __init__(self, pool: PoolView) -> None:
        _, _, self._heads, self._head_dim = pool.layers[0].shape
        self._buffer = torch.zeros(0, dtype=pool.layers[0].dtype, device=pool.device)

    def chunk(self, num_layers: int, num_tokens: int) -> Tensor:
        """[layers, 2, T, H, D]"""
        shape = (num_layers, 2, num_tokens, self._heads, self._head_dim)
        count = torch.Size(shape).numel()
        if self._buffer.numel() < count:
            self._buffer = torch.zeros(count, dtype=self._buffer.dtype, device=self._buffer.device)
        return self._buffer[:count].view(shape)


class StagedSender:
    """A SendChannel that gathers slots into a buffer and sends that over a BytePipe."""

    def __init__(self, pipe: BytePipe, pool: PoolView) -> None:
        self._pipe = pipe
        self._pool = pool
        self._staging = _Staging(pool)

    def send(self, layers: range, slots: Slots) -> None:
        chunk_L2THD = self._staging.chunk(len(layers), len(slots))
        self._pool.gather(layers, slots, chunk_L2THD)
        self._pipe.send(chunk_L2THD.view(-1).view(torch.uint8))

    def flush(self) -> None:
        """Return at once: nothing reads the pool once `send` has returned."""

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class StagedReceiver:
    """A ReceiveChannel that reads a BytePipe into a buffer and scatters that into slots."""

    def __init__(self, pipe: BytePipe, pool: PoolView) -> None:
        self._pipe = pipe
        self._pool = pool
        self._staging = _Staging(pool)

    def receive(self, layers: range, slots: Slots) -> None:
        chunk_L2THD = self._staging.chunk(len(layers), len(slots))
        self._pipe.receive(chunk_L2THD.view(-1).view(torch.uint8))
        self._pool.scatter(layers, slots, chunk_L2THD)

    def flush(self) -> None:
        """Return at once: the sender waits for nothing."""

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()
