"""The small interface behind which the ways of moving KV hide: one channel per (prefill, decode) pair and epoch.

    prefill: `connect_sender` ──offer (bytes)──► decode: `connect_receiver` ──answer (bytes)──► prefill

A channel moves one *layer chunk* at a time: for a few consecutive layers (`plan.layer_groups`), K and V of the tokens of one
push, in the order in which pushes were announced. That order is the protocol; nothing on the channel names what it carries.
Channels move bytes and vouch for nothing: what arrived is compared with what was sent by `fingerprint`, pool to pool.

All calls on a channel come from its pair's one transfer thread and may block, but never beyond the deadline given at
connect; only `close` may come from elsewhere, after that thread has ended. After a TransportError a channel is dead: its
owner closes it, and a new epoch of the pair starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kv_transfer.pool_view import PoolView, Slots


class TransportError(Exception):
    """The pair is dead: the peer died, stopped, or broke the protocol."""


class SendChannel(Protocol):
    def send(self, layers: range, slots: Slots) -> None:
        """Send one layer chunk of these slots. They must stay as they are until `flush` has returned."""

    def flush(self) -> None:
        """Wait until everything that was sent may be overwritten."""

    def close(self) -> None: ...


class ReceiveChannel(Protocol):
    def receive(self, layers: range, slots: Slots) -> None:
        """Receive one layer chunk into these slots: on a GPU, for what this thread launches afterwards."""

    def close(self) -> None: ...


class SendTransport(Protocol):
    """Prefill's side of one way of moving KV. Both sides know it by `name`."""

    @property
    def name(self) -> str: ...

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        """`exchange` sends our offer to the peer and returns its answer, or raises the peer's refusal.

        Blocks. Raises TransportError.
        """


class ReceiveTransport(Protocol):
    """Decode's side."""

    @property
    def name(self) -> str: ...

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        """`answer` must be called once, before waiting for the peer; what fails earlier is a refusal.

        Blocks. Raises TransportError.
        """
