"""The small interface behind which the ways of moving KV hide: one channel per (prefill, decode) pair and epoch.

    prefill: `connect_sender` ──offer (bytes)──► decode: `connect_receiver` ──answer (bytes)──► prefill

A channel moves one *layer chunk* at a time: for a few consecutive layers (`plan.layer_groups`), K and V of the segments of one
push, in the order in which pushes were announced. That order is the protocol; nothing on the channel names what it carries.
Both ends return a digest per segment over the bytes that left or arrived, from which the commit record is made.

All calls on a channel come from its pair's one transfer thread and may block, but never beyond the deadline given at
connect; only `close` may come from elsewhere, after that thread has ended. After a TransportError a channel is dead: its
owner closes it, and a new epoch of the pair starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TransportError(Exception):
    """The pair is dead: the peer died, stopped, or broke the protocol."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one transfer within one push, by where they lie in the local pool."""

    slot_ids_T: Tensor
    """int64 [T]: slot of each token."""


LayerSlots = Callable[[int], Tensor]
"""Layer index to its view of the pool, [2 (K, V), slots, kv heads, head dim]."""


class SendChannel(Protocol):
    def send_chunk(self, layers: range, segments: Sequence[Segment]) -> list[bytes]:
        """Send one layer chunk; returns a digest per segment once the pool may be written again."""

    def close(self) -> None: ...


class ReceiveChannel(Protocol):
    def receive_chunk(self, layers: range, segments: Sequence[Segment]) -> list[bytes]:
        """Receive one layer chunk into the pool; returns a digest per segment."""

    def close(self) -> None: ...


class Transport(Protocol):
    """One way of moving KV. `name` is what the two sides agree on in PairOpen."""

    name: str

    def connect_sender(self, exchange: Callable[[bytes], bytes], slots: LayerSlots, deadline_s: float) -> SendChannel:
        """Prefill's end. `exchange` sends our offer to the peer and returns its answer. Blocks; raises TransportError."""

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], slots: LayerSlots, deadline_s: float
    ) -> ReceiveChannel:
        """Decode's end. `answer` must be called once, before waiting for the peer. Blocks; raises TransportError."""
