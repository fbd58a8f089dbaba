"""KV at the pace of a link that need not be there: bytes go as another transport moves them, but only after their time.

A paced worker's pool holds a few bytes of each token (`engine.paced`). What a profile says that they would be in the real model
is what they take on the link, of which a worker has one: what is sent to several peers waits for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from configs.paced.profile import PACED_LAYERS, PacedProfile
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.transport import SendChannel, SendTransport, TransportError


class Link:
    """What one worker sends by. Used from the threads of all its channels."""

    def __init__(self, profile: PacedProfile) -> None:
        self._token_layer_s = profile.kv_token_bytes / PACED_LAYERS / profile.link_bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, token_layers: int, deadline_s: float) -> float:
        """Return in how many seconds so many tokens of a layer are over, behind all that was reserved before.

        Reserves nothing and raises TransportError if that is later than in `deadline_s`.
        """
        now = time.monotonic()
        with self._lock:
            over_at = max(now, self._free_at) + token_layers * self._token_layer_s
            if over_at - now > deadline_s:
                raise TransportError(f"the link is taken for {over_at - now:.1f} s")
            self._free_at = over_at
            return over_at - now


class PacedSender:
    """A transport's sending side, at the pace of a link."""

    def __init__(self, transport: SendTransport, link: Link) -> None:
        self._transport = transport
        self._link = link

    @property
    def name(self) -> str:
        """Name of the transport that moves the bytes."""
        return self._transport.name

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        """Connect as the transport does."""
        return _PacedChannel(self._transport.connect_sender(exchange, pool, deadline_s), self._link, deadline_s)


class _PacedChannel:
    def __init__(self, channel: SendChannel, link: Link, deadline_s: float) -> None:
        self._channel = channel
        self._link = link
        self._deadline_s = deadline_s

    def send(self, layers: range, slots: Slots) -> None:
        time.sleep(self._link.reserve(len(layers) * len(slots), self._deadline_s))
        self._channel.send(layers, slots)

    def flush(self) -> None:
        self._channel.flush()

    def interrupt(self) -> None:
        self._channel.interrupt()

    def close(self) -> None:
        self._channel.close()


def at_pace(transports: Sequence[SendTransport], profile: PacedProfile) -> Sequence[SendTransport]:
    """Return the same ways of sending, all over one link of the profile."""
    link = Link(profile)
    return [PacedSender(transport, link) for transport in transports]
