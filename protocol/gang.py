"""What the ranks of one worker tell each other. The first one asks, the others answer; values for the store go both ways.

    first ──GangJoin──► other          GangJoined | Failed          once; until then StoreValue both ways
    first ──RunStep──► other           StepDone | Failed            every step, in order
    first ──LaneOffer──► other         LaneOffered | Failed         a prefill rank begins to connect a lane
    first ──LaneConnect──► other       LaneConnected | Failed       … and ends with the peer's answer
    first ──LaneAccept──► other        LaneOffered | Failed         a decode rank begins to accept one
    first ──LaneAwait──► other         LaneConnected | Failed       … and ends when it is connected
    first ──LaneSend, LaneReceive──►   LaneDone | Failed            one push
    first ──LaneClose──► other         LaneClosed
    first ──Ping──► other              Ping                         every heartbeat

Arrays of ints travel as bytes (int32, little-endian): a step's block tables have thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message

STEP_LEASES = 6
"""Number of leases (`limits.lease_s`) that a step may take, on the slowest processor. A worker that reports, and neither makes
a step nor moves KV for longer, is stuck. Whoever needs what a step computes waits as long: other ranks, and the worker that its
KV goes to."""


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, start + num_tokens) of one transfer, and where they lie in this worker's pools."""

    block_table: tuple[int, ...]
    start: int
    num_tokens: int
    digest_block_size: int
    """The decode worker's block size: in such blocks both sides take fingerprints."""


@message(50)
@dataclass(frozen=True)
class GangJoin:
    call_id: int


@message(51)
@dataclass(frozen=True)
class GangJoined:
    """The rank is connected to the others and its model is loaded."""

    call_id: int
    num_blocks: int
    arithmetic: str
    """The name of the arithmetic by which this rank computes."""
    gpu: str
    """UUID of the GPU that it computes on; empty on a processor."""


@message(52)
@dataclass(frozen=True)
class StoreValue:
    """A rank has set this in `engine.ranks.store`."""

    key: str
    value: bytes


@dataclass(frozen=True)
class StepChunk:
    """`engine.batch.Chunk` as far as a rank that does not sample needs it."""

    token_ids: bytes
    start: int
    block_table: bytes
    """Empty if it continues the chunk before it, whose table is its own."""
    samples: bool
    scores: bool
    continues: bool


@message(53)
@dataclass(frozen=True)
class RunStep:
    call_id: int
    step: int
    """Number of the step, from 1 on."""
    chunks: tuple[StepChunk, ...]
    tells_layers: bool
    """KV of this step is sent while it is computed, so ranks tell of each layer."""
    niceness: int
    """How much nicer than its process the thread is that computes the step: on every rank as on the first."""


@message(54)
@dataclass(frozen=True)
class StepDone:
    """All KV of the step is in this rank's pool, and nothing of the step runs any more."""

    call_id: int


@dataclass(frozen=True)
class HeadMove:
    """Neighbouring heads that one rank's pool gives to another's; indices count within each pool."""

    prefill_rank: int
    decode_rank: int
    source_head: int
    destination_head: int
    num_heads: int


@message(55)
@dataclass(frozen=True)
class LaneOffer:
    call_id: int
    lane: int
    """Chosen by the first rank, never used again."""
    move: HeadMove
    transport: str


@message(56)
@dataclass(frozen=True)
class LaneOffered:
    """Address material for the peer."""

    call_id: int
    rendezvous: bytes


@message(57)
@dataclass(frozen=True)
class LaneConnect:
    call_id: int
    lane: int
    rendezvous: bytes


@message(58)
@dataclass(frozen=True)
class LaneConnected:
    call_id: int


@message(59)
@dataclass(frozen=True)
class LaneAccept:
    call_id: int
    lane: int
    move: HeadMove
    transport: str
    rendezvous: bytes


@message(60)
@dataclass(frozen=True)
class LaneAwait:
    call_id: int
    lane: int


@message(61)
@dataclass(frozen=True)
class LaneSend:
    call_id: int
    lane: int
    step: int
    spans: tuple[TokenSpan, ...]


@message(62)
@dataclass(frozen=True)
class LaneReceive:
    call_id: int
    lane: int
    spans: tuple[TokenSpan, ...]


@message(63)
@dataclass(frozen=True)
class LaneDone:
    call_id: int
    digests: tuple[bytes, ...]
    """Fingerprint of each span."""


@message(64)
@dataclass(frozen=True)
class LaneClose:
    """Also of a lane that is still connecting, or was never there."""

    call_id: int
    lane: int


@message(65)
@dataclass(frozen=True)
class LaneClosed:
    call_id: int
