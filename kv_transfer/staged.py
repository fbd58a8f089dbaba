"""Layer chunks over anything that moves bytes: gather into a staging buffer, move, scatter from a staging buffer.

The buffers live as long as the channel, because the faults of fresh pages cost more than the copy itself.
In a buffer, segments follow each other, each as [layers, 2 (K, V), tokens, kv heads, head dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from engine.kernels.kv_cache import gather_tokens, scatter_tokens
from kv_transfer.transport import LayerSlots, Segment


class BytePipe(Protocol):
    """One direction of a connection. Both calls block until the buffer may be used again; raise TransportError."""

    def send(self, payload: Tensor) -> None:
        """`payload`: uint8 [n], contiguous."""

    def receive(self, into: Tensor) -> None:
        """Fill `into`, uint8 [n], contiguous."""

    def close(self) -> None: ...


def digest(part: Tensor) -> bytes:
    """xxh3_64 of a contiguous tensor's bytes."""
    return xxhash.xxh3_64_digest(part.view(-1).view(torch.uint8).numpy().data)


class _Staging:
    """A buffer that grows to the largest chunk seen, and its division into segments."""

    def __init__(self, slots: LayerSlots) -> None:
        self._slots = slots
        self._buffer: Tensor | None = None

    def parts(self, layers: range, segments: Sequence[Segment]) -> tuple[list[Tensor], Tensor]:
        """One [layers, 2, T, H, D] view per segment, and the whole as bytes."""
        slots_2SHD = self._slots(layers.start)
        _, _, heads, head_dim = slots_2SHD.shape
        counts = [len(layers) * 2 * len(segment.slot_ids_T) * heads * head_dim for segment in segments]
        if self._buffer is None or self._buffer.numel() < sum(counts):
            self._buffer = torch.zeros(sum(counts), dtype=slots_2SHD.dtype)
        used = self._buffer[: sum(counts)]
        views = [part.view(len(layers), 2, -1, heads, head_dim) for part in torch.split(used, counts)]
        return views, used.view(torch.uint8)


class StagedSender:
    """A SendChannel over a BytePipe."""

    def __init__(self, pipe: BytePipe, slots: LayerSlots) -> None:
        self._pipe = pipe
        self._slots = slots
        self._staging = _Staging(slots)

    def send_chunk(self, layers: range, segments: Sequence[Segment]) -> list[bytes]:
        parts, payload = self._staging.parts(layers, segments)
        for segment, part_L2THD in zip(segments, parts, strict=True):
            for layer, part_2THD in zip(layers, part_L2THD, strict=True):
                gather_tokens(self._slots(layer), segment.slot_ids_T, part_2THD)
        digests = [digest(part) for part in parts]
        self._pipe.send(payload)
        return digests

    def close(self) -> None:
        self._pipe.close()


class StagedReceiver:
    """A ReceiveChannel over a BytePipe."""

    def __init__(self, pipe: BytePipe, slots: LayerSlots) -> None:
        self._pipe = pipe
        self._slots = slots
        self._staging = _Staging(slots)

    def receive_chunk(self, layers: range, segments: Sequence[Segment]) -> list[bytes]:
        parts, payload = self._staging.parts(layers, segments)
        self._pipe.receive(payload)
        digests = [digest(part) for part in parts]
        for segment, part_L2THD in zip(segments, parts, strict=True):
            for layer, part_2THD in zip(layers, part_L2THD, strict=True):
                scatter_tokens(self._slots(layer), segment.slot_ids_T, part_2THD)
        return digests

    def close(self) -> None:
        self._pipe.close()
