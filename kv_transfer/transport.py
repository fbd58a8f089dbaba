"""The small interface behind which the ways of moving KV hide: one channel per (prefill, decode) pair and epoch.

    prefill: `connect_sender` ──offer (bytes)──► decode: `connect_receiver` ──answer (bytes)──► prefill

A channel moves one *layer chunk* at a time: for a few consecutive layers (`plan.layer_groups`), K and V of the tokens of one
push, in the order in which pushes were announced. That order is the protocol; nothing on the channel names what it carries.
Channels move bytes and vouch for nothing: what arrived is compared with what was sent by `fingerprint`, pool to pool.

All calls on a channel come from its pair's one transfer thread and may block, but never beyond the deadline given at
connect. Only `interrupt` may come from elsewhere, and `close` after that thread has ended. After a TransportError a channel is
dead: its owner closes it, and a new epoch of the pair starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kv_transfer.pool_view import PoolView, Slots


class TransportError(Exception):
    """The pair is dead: the peer died, stopped, or broke the protocol."""


class LackError(TransportError):
    """This machine has no descriptor or no thread left, for the moment."""


class SendChannel(Protocol):
    """The sending end of one connected channel. Used from one thread."""

    def send(self, layers: range, slots: Slots) -> None:
        """Send some layers of these slots, which must stay as they are until `flush` has returned. Raises TransportError."""

    def flush(self) -> None:
        """Wait until everything that was sent may be overwritten. Raises TransportError."""

    def interrupt(self) -> None:
        """Have a call of the transfer thread raise TransportError soon, and all later ones."""

    def close(self) -> None:
        """End the channel and give back what it holds."""


class ReceiveChannel(Protocol):
    """The receiving end of one connected channel. Used from one thread."""

    def receive(self, layers: range, slots: Slots) -> None:
        """Receive some layers into these slots. On a GPU they are there for what this thread launches afterwards.

        Raises TransportError.
        """

    def flush(self) -> None:
        """Tell the sender, if it waits for that, that everything received is in the slots. Raises TransportError."""

    def interrupt(self) -> None:
        """Have a call of the transfer thread raise TransportError soon, and all later ones."""

    def close(self) -> None:
        """End the channel and give back what it holds."""


class SendTransport(Protocol):
    """One way of moving KV, from the sender's side. Both sides know it by `name`."""

    @property
    def name(self) -> str:
        """Name of the transport, the same on both sides."""

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        """Connect a channel from this pool. Blocks for up to `deadline_s` seconds.

        `exchange` sends our offer to the peer and returns its answer, or raises the peer's refusal. Raises TransportError.
        """


class ReceiveTransport(Protocol):
    """One way of moving KV, from the receiver's side. Both sides know it by `name`."""

    @property
    def name(self) -> str:
        """Name of the transport, the same on both sides."""

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        """Connect a channel into this pool, as a sender has offered. Blocks for up to `deadline_s` seconds.

        `answer` must be called once, before waiting for the peer; what fails earlier is a refusal. Raises TransportError.
        """
