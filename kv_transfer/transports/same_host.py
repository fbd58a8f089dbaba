"""What the transports within a host have in common: decode reads from prefill's own pool, and they talk over a Unix socket.

    prefill                                             decode
      │ listens under a random abstract name
      │ offer (name, key, where its rows lie) ─ wire ────► │ connects; on another host there is nobody: refused
      │ ◄─────────────────────────────────── proof(key) ── │
      │ proof(key), files (SCM_RIGHTS) ──────────────────► │
      │ these layers of these slots are there ───────────► │ copies
      │ ◄─────────────────────────────────────── copied ── │

The only writer of decode's blocks is decode itself, and the only writer of prefill's is its engine. A peer that
dies or stops can't write late into blocks that were given to somebody else; one that reads late finds a fingerprint that does
not fit, or a ticket that can no longer be committed. The kernel frees names and sockets with the processes, however they end.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kv_transfer.plan import SlotRun
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.transport import TransportError
from kv_transfer.transports.pipes import BACKLOG, KEY_BYTES, Pipe, accept_decode, proof

_OFFER = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQQ")
_NOTICE = struct.Struct("<I")
"""Runs of slots that follow, each as `_RUN`: where the chunk lies in prefill's pool."""
_RUN = struct.Struct("<QQ")
_COPIED = b"c"
_MAX_RUNS = 1 << 20


class Offer(NamedTuple):
    """What the receiver is told about the sender's pool, over the authenticated connection."""

    name: bytes
    """Name of the socket at which the sender listens."""
    key: bytes
    num_slots: int
    """Number of slots of the sender's pool."""
    stride_bytes: int
    """Bytes from one slot to the next."""
    first_byte: int
    """Byte of a slot at which the rows of this channel begin."""
    memory: bytes
    """How to reach the pool, if the transport passes no file for it."""

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """Read an offer from bytes. Raises TransportError if they are none."""
        try:
            name, key, num_slots, stride_bytes, first_byte = _OFFER.unpack_from(data)
        except struct.error:
            raise TransportError(f"an offer of {len(data)} bytes") from None
        return cls(name, key, num_slots, stride_bytes, first_byte, memory=data[_OFFER.size :])

    def pack(self) -> bytes:
        """Return the offer as bytes, for `PairOpen`."""
        return _OFFER.pack(*self[:-1]) + self.memory

    def check(self, pool: PoolView) -> None:
        """Check that the offered rows are of this pool's layout. Raises TransportError if not."""
        if self.first_byte + pool.row_bytes > self.stride_bytes:
            raise TransportError("prefill's rows are not of this layout")


class Source(Protocol):
    """The sender's pool, as the receiver reaches it."""

    def copy(self, layers: range, runs: Sequence[SlotRun], slots: Slots) -> None:
        """Copy these runs of the source's slots into as many slots of the receiver's pool. On a GPU, launch that."""

    def settle(self) -> None:
        """Wait until all copies are there."""


def meet_decode(
    exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float, memory: bytes = b"", files: Sequence[int] = ()
) -> Pipe:
    """Listen, offer, and accept the receiver's connection. Raises TransportError, or what `exchange` raised."""
    key = os.urandom(KEY_BYTES)
    name = os.urandom(KEY_BYTES)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address(name))
        listener.listen(BACKLOG)
        exchange(Offer(name, key, pool.num_slots, pool.stride_bytes, pool.first_byte, memory).pack())
        return accept_decode(listener, key, deadline_s, files)


def meet_prefill(offer: Offer, deadline_s: float) -> Pipe:
    """Connect to the sender that has made this offer, and prove who we are. Its own proof comes when it has our answer.

    Raises TransportError.
    """
    pipe = Pipe(connection := socket.socket(socket.AF_UNIX), deadline_s)
    try:
        connection.connect(_address(offer.name))
        pipe.send(proof(offer.key, b"decode"))
    except OSError:
        pipe.close()
        raise TransportError("this host has no such prefill worker") from None
    except BaseException:
        pipe.close()
        raise
    return pipe


class SameHostSendChannel:
    """The sending end: tells the receiver which slots to copy, and hears when it has."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._in_flight = 0

    def send(self, layers: range, slots: Slots) -> None:
        """Tell the receiver which slots are complete. Which layers they are of, both sides know from their order."""
        self._pipe.send(_NOTICE.pack(len(slots.runs)) + b"".join(_RUN.pack(*run) for run in slots.runs))
        self._in_flight += 1

    def flush(self) -> None:
        """Wait until the receiver has copied everything. Raises TransportError."""
        if self._pipe.receive(self._in_flight) != _COPIED * self._in_flight:
            raise TransportError("decode broke the protocol")
        self._in_flight = 0

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class SameHostReceiveChannel:
    """The receiving end: copies the slots that the sender names out of its pool."""

    def __init__(self, pipe: Pipe, source: Source, num_source_slots: int) -> None:
        self._pipe = pipe
        self._source: Source | None = source
        self._num_source_slots = num_source_slots
        self._in_flight = 0

    def receive(self, layers: range, slots: Slots) -> None:
        assert self._source is not None, "the channel is closed"
        self._source.copy(layers, self._notice(len(slots)), slots)
        self._in_flight += 1

    def flush(self) -> None:
        assert self._source is not None, "the channel is closed"
        self._source.settle()
        self._pipe.send(_COPIED * self._in_flight)
        self._in_flight = 0

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()
        self._source = None

    def _notice(self, num_tokens: int) -> Sequence[SlotRun]:
        (num_runs,) = _NOTICE.unpack(self._pipe.receive(_NOTICE.size))
        if num_runs > _MAX_RUNS:
            raise TransportError(f"{num_runs} runs of slots are announced")
        runs = [SlotRun(*pair) for pair in _RUN.iter_unpack(self._pipe.receive(num_runs * _RUN.size))]
        if sum(run.length for run in runs) != num_tokens:
            raise TransportError(f"prefill sends {sum(run.length for run in runs)} tokens where {num_tokens} were announced")
        if any(run.length == 0 or sum(run) > self._num_source_slots for run in runs):
            raise TransportError("a run of slots lies outside of prefill's pool")
        return runs


def _address(name: bytes) -> bytes:
    """In the abstract namespace, where nothing is left behind. The kernel limits a name to 107 bytes."""
    return b"\0tandem-kv-" + name.hex().encode()
