"""Messages between whoever has KV and the decode worker that gets it."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.messages.workers import KvLayout, WorkerRef


@message(30)
@dataclass(frozen=True)
class PairOpen:
    """Asks for a lane over this transport; `rendezvous` is the transport's own address material.

    A pair has one for each move of `kv_transfer.shards.head_moves`. Refused with transport_unavailable, another transport may
    be offered.
    """

    call_id: int
    prefill: WorkerRef
    decode_epoch: int
    layout: KvLayout
    lane: int
    """Number of the lane in the plan of moves between the two workers' ranks."""
    transport: str
    rendezvous: bytes


@message(31)
@dataclass(frozen=True)
class PairOpened:
    """The answer to `PairOpen`: the lane is open at decode's end."""

    call_id: int
    rendezvous: bytes


@dataclass(frozen=True)
class PushSegment:
    """Tokens [start, start + num_tokens) of one transfer."""

    ticket_id: int
    transfer_id: int
    start: int
    num_tokens: int
    added: tuple[int, ...] = ()
    """Tokens that follow those for which the ticket stands by now: a stream that migrates goes on meanwhile."""
    mixed: bool = False
    """Some of the KV that the sender has of this transfer was computed by another arithmetic than its own."""


@message(32)
@dataclass(frozen=True)
class PushAnnounce:
    """The next thing on this pair's wire: these segments, layer by layer. The order of announcements is the order of bytes."""

    call_id: int
    segments: tuple[PushSegment, ...]


@message(33)
@dataclass(frozen=True)
class PushPosted:
    """Receives are posted for all but the refused segments; nothing is sent for those."""

    call_id: int
    refused: tuple[int, ...]
    """Places in the announcement of segments whose tickets were cancelled or have expired."""


@message(34)
@dataclass(frozen=True)
class PushCommit:
    """Closes a transfer: what was sent, so that decode can check that just this arrived."""

    call_id: int
    ticket_id: int
    transfer_id: int
    num_tokens: int
    num_layers: int
    layout: KvLayout
    fingerprints: tuple[bytes, ...]
    """Fingerprints by lane: 64 bits of each block, in order (`kv_transfer.fingerprints.pushes`)."""


@message(35)
@dataclass(frozen=True)
class Committed:
    """The answer to `PushCommit`: decode's pool holds what was sent, and the ticket may be attached."""

    call_id: int


@message(36)
@dataclass(frozen=True)
class TransferAbort:
    """Prefill gives up on this transfer (cancelled, or failed on its side); no further push will name it."""

    ticket_id: int
    transfer_id: int


@message(37)
@dataclass(frozen=True)
class PairClosed:
    """Decode's end of the channel is dead; what was on it has failed, and the next push needs a new pair."""

    reason: str
