"""Every message that crosses a socket of Tandem, in the order of a request's life.

    router ──Reserve──► decode        Reserved | Failed(overloaded)
    router ──Prefill──► prefill       FirstToken | Failed
    prefill ─PairOpen─► decode        PairOpened | Failed                 once per pair and epoch
    prefill ─PushAnnounce─► decode    PushPosted                          once per prefill step, before its KV is sent
    prefill ─PushCommit─► decode      Committed | Failed                  closes the transfer; TransferAbort gives it up
    router ──Attach──► decode         Attached | Failed                   waits for the commit if it must; or prefills there
    decode ──TokenFrame──► router     one per router and step
    decode ──PairClosed─► prefill     when decode's end of their channel has died
    router ──Release──► decode        idempotent, no answer;  Cancel likewise to prefill
    router ──Migrate──► decode        Migrated | Failed                   while the stream runs; KV goes as from prefill

A message with a `call_id` is a question; its answer carries the same `call_id`. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple

from protocol.codec import message
from protocol.errors import TandemError, error_from_code
from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from protocol.share import NOBODYS, Share
from protocol.trace import TraceContext


class Role(Enum):
    """What routers ask of a worker: to compute prompts, or to make tokens."""

    PREFILL = "prefill"
    DECODE = "decode"


class Duty(Enum):
    """What a worker is asked for: the work of one role, or of both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def role(self) -> Role:
        """The role that the worker counts as where workers are counted: one that does both is a decode worker."""
        return Role.PREFILL if self is Duty.PREFILL else Role.DECODE

    def does(self, role: Role) -> bool:
        """Whether the work of this role is part of it."""
        return self is Duty.BOTH or self.role is role

    @property
    def in_words(self) -> str:
        """What a worker is that has it."""
        return "a worker of both roles" if self is Duty.BOTH else f"a {self.value} worker"


class WorkerLife(NamedTuple):
    """Names one life of one worker: every start of a worker has a higher epoch than the one before."""

    worker_id: str
    epoch: int


VARIES = " (varies)"
"""How the name of an arithmetic ends by which a token's bits depend on what is computed beside it."""


@dataclass(frozen=True)
class WorkerRef:
    """One life of one worker: a message or transfer that names another epoch belongs to a former life and is refused."""

    worker_id: str
    epoch: int
    address: str
    """Where its socket listens, as `tcp://host:port`."""
    num_ranks: int = 1
    """Number of the worker's tensor-parallel ranks. The first rank speaks for all."""
    arithmetic: str = ""
    """The name of the arithmetic by which it computes (`engine.arithmetic`). It ends with `VARIES` where a token's bits depend
    on what is computed beside it. No part of the layout: workers of different arithmetics hand over KV to each other."""
    weights: str = ""
    """Which weights it has: the first digits of `ModelFacts.identity`."""

    @property
    def computation(self) -> str:
        """The name of what it computes: weights and arithmetic.

        Workers of one name give a token the same KV and logits from the same tokens before it. It ends with `VARIES` if the
        arithmetic does.
        """
        return f"{self.weights} {self.arithmetic}" if self.weights else self.arithmetic

    @property
    def life(self) -> WorkerLife:
        """Worker id and epoch, without the address."""
        return WorkerLife(self.worker_id, self.epoch)


@dataclass(frozen=True)
class Ticket:
    """A decode worker's promise of blocks, given to the router, passed on to prefill."""

    ticket_id: int
    transfer_id: int
    """Identity of the one transfer that may fill it; never derived from the client's request id."""
    worker: WorkerRef
    block_size: int
    block_table: tuple[int, ...]
    num_prompt_tokens: int
    held_tokens: int
    """Tokens at the prompt's beginning whose KV the decode worker has already, in whole blocks. Nothing is sent for them."""
    unseen_tokens: int = 0
    """Tokens at the prompt's beginning that lie before the sliding windows of the first generated token. Nothing is sent for
    them either."""

    @property
    def sent_from(self) -> int:
        """Position of the first token whose KV is sent."""
        return max(self.held_tokens, self.unseen_tokens)


@dataclass(frozen=True)
class KvLayout:
    """What must be equal on both sides of a handoff."""

    model_hash: str
    """Identity of the model, `ModelFacts.identity`."""
    dtype: str
    """The type that is computed in, which decides the bits of KV in every format."""
    kv_cache_dtype: str
    """Format of K and V in the pool; `auto` is the type that they are computed in."""
    num_layers: int
    num_kv_heads: int
    """Number of KV heads of the whole model, however many ranks share them."""
    head_dim: int
    layout_version: int
    memory: str
    """The kind of device in whose memory the pool lies, such as cpu or cuda: by it go fingerprints and transports."""
    positions: str = ""
    """What rotary positions are, where the model's files alone do not say it: `ModelFacts.positions`."""

    def differences(self, other: KvLayout) -> list[str]:
        """Sentences such as `dtype: float32 here, bfloat16 there`; empty if the two fit."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name}: {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs]


# -- any direction ---------------------------------------------------------------------------------------------------


@message(1)
@dataclass(frozen=True)
class Failed:
    """The answer to any question that can't be fulfilled."""

    call_id: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None

    @classmethod
    def from_error(cls, call_id: int, error: TandemError) -> Failed:
        return cls(call_id, error.code, error.message, error.param, error.retry_after_s)

    def to_error(self) -> TandemError:
        return error_from_code(self.code, self.message, self.param, self.retry_after_s)


@message(2)
@dataclass(frozen=True)
class Ping:
    """Sent by every client of a worker once a second: it renews the leases of all that this client owns there."""


MEMORY, DISK, PEER = "memory", "disk", "peer"
"""Where the KV of a prompt may come from, besides the worker's own pool."""
FAILED_LATE_S = 0.1
"""A peer that takes longer to say that it has nothing, or does not say it, is not asked again for a while."""


@dataclass(frozen=True)
class Brought:
    """Tokens at a prompt's beginning whose KV came from elsewhere, beyond what the worker's own pool held."""

    peer_tokens: int = 0
    """Tokens whose KV came out of other workers' pools."""
    peer_s: float = 0.0
    """Seconds that other workers took. With no tokens: a peer was asked in vain."""
    memory_tokens: int = 0
    """Tokens whose KV came out of the node's memory tier."""
    disk_tokens: int = 0
    """Tokens whose KV came out of the node's disk tier."""
    seconds: float = 0.0
    """Seconds that the prompt waited for all of it, and for what did not come."""

    @classmethod
    def of(cls, source: str, num_tokens: int, seconds: float) -> Brought:
        """Return what one source brought: MEMORY, DISK or PEER, the number of tokens, and the seconds that it took."""
        peer, memory, disk = (num_tokens if source == name else 0 for name in (PEER, MEMORY, DISK))
        return cls(peer, seconds if source == PEER else 0.0, memory, disk, seconds)

    @property
    def num_tokens(self) -> int:
        """Tokens from all sources together."""
        return self.peer_tokens + self.memory_tokens + self.disk_tokens

    def __add__(self, other: Brought) -> Brought:
        return Brought(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


NOTHING_BROUGHT = Brought()


@dataclass(frozen=True)
class TierReport:
    """What lies in one tier of a node, and what the reporting worker has done with it since its start."""

    name: str
    """Name of the tier: `memory` or `disk`."""
    num_blocks: int
    """Blocks in the tier, of all workers of the node."""
    num_bytes: int
    stored: int
    """Blocks that this worker has written."""
    evicted: int
    """Blocks that this worker has evicted, as the tier was full."""
    damaged: int
    """Files that this worker found damaged, and removed."""
    foreign: int
    """Files of another model, format or version that this worker found, and removed."""
    failed_writes: int
    """Blocks that this worker could not write."""
    bytes_written: int
    bytes_read: int


@dataclass(frozen=True)
class GpuReport:
    """What NVML tells of one GPU, as a whole: others may use it, too. None is what NVML does not tell."""

    uuid: str
    """Id of the GPU, as `nvidia-smi -L` writes it: GPU-8a3d..."""
    utilization: float | None
    """Share of the time in which it computed something, from 0 to 1."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_c: int | None
    """Temperature of the GPU in degrees Celsius; None if NVML does not say."""
    power_w: float | None
    """Power that the GPU draws, in watts; None if NVML does not say."""
    ecc_uncorrected: int | None
    """Memory errors that ECC could not correct, since the driver was loaded."""
    latest_xid: int | None
    """The latest XID error since the worker's start; 0 if there was none."""


@dataclass(frozen=True)
class PrefillLoad:
    """The part of a load report that a worker has as a prefill worker."""

    computed_tokens: int
    """Prompt tokens computed since start."""


@dataclass(frozen=True)
class DecodeLoad:
    """The part of a load report that a worker has as a decode worker."""

    reservable_blocks: int
    """Free KV blocks that a new ticket may take."""
    generated_tokens: int
    """Tokens generated since start."""
    prefilled_tokens: int
    """Prompt tokens computed since start; those that were computed again are not counted."""
    num_preemptions: int
    """Running sequences that had to give their blocks back, since start."""
    recomputed_tokens: int
    """Tokens that were computed again after a preemption, since start."""
    step_s: float
    """Seconds that a stream waits for a token: the time of the latest step that computed nothing of a prompt.

    With guesses it is divided by the tokens that a stream gets in a step. 0 before the first such step.
    """
    draft_tokens: int = 0
    """Tokens guessed since start."""
    accepted_tokens: int = 0
    """Guessed tokens that were right, since start."""


@message(3)
@dataclass(frozen=True)
class LoadReport:
    """What a worker is doing: a common part, and one for each role that it has.

    It is sent to every client when it changes (at most every 50 ms), and once a second anyway. The properties answer for a
    worker of any role; what its roles don't have is 0.
    """

    worker_id: str
    epoch: int
    running: int
    """Sequences in the current batch."""
    waiting: int
    """Requests that are queued (prefill), or hold a ticket and are not attached, or were preempted (decode)."""
    queued_tokens: int
    """Prompt tokens not yet computed, of prompts that are computed here."""
    free_blocks: int
    total_blocks: int
    tickets: int
    """Tickets not in a final state (decode) or prompts whose KV is held (prefill)."""
    transfers: int
    """Transfers in flight."""
    steps: int
    busy_s: float
    """Time spent in the engine since start."""
    step_age_s: float
    """How long the current step has been running; 0 when idle."""
    cached_blocks: int
    """KV blocks that can be found in the worker's prefix cache, whoever owns them."""
    prefix_cache_queries: int
    """Tokens of the prompts that were looked up in the worker's prefix cache since start."""
    prefix_cache_hits: int
    """Looked-up tokens whose KV was there, so that it was not computed again (prefill) or not sent again (decode)."""
    prefix_cache_evictions: int = 0
    """Cached blocks that were given to something else, since start."""
    lent_tokens: int = 0
    """Tokens whose KV other workers fetched from the pool, since start."""
    lent_bytes: int = 0
    """Bytes of that KV."""
    sent_bytes: int = 0
    """Bytes of KV that were sent to other workers since start, whatever for."""
    brought: Brought = NOTHING_BROUGHT
    """What came into the pool from elsewhere for prompts that were started, since start."""
    failed_fetches: int = 0
    """Fetches from other workers that brought nothing, since start."""
    tiers: tuple[TierReport, ...] = ()
    """The tiers of the worker's node."""
    gpus: tuple[GpuReport, ...] = ()
    """The GPUs that the worker computes on, as they were some seconds ago; empty where there are none."""
    prefill: PrefillLoad | None = None
    decode: DecodeLoad | None = None

    @property
    def life(self) -> WorkerLife:
        """Which life of the worker this is about."""
        return WorkerLife(self.worker_id, self.epoch)

    @property
    def tokens(self) -> int:
        """Prompt tokens computed (prefill) and tokens generated (decode) since start."""
        return (self.prefill.computed_tokens if self.prefill else 0) + (self.decode.generated_tokens if self.decode else 0)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed since start, in any role; those that were computed again are not counted."""
        return (self.prefill.computed_tokens if self.prefill else 0) + (self.decode.prefilled_tokens if self.decode else 0)

    @property
    def kv_usage(self) -> float:
        """Share of the worker's KV blocks that are taken, from 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def reservable_blocks(self) -> int:
        """Free KV blocks that a new ticket may take; 0 at a worker that gives no tickets."""
        return self.decode.reservable_blocks if self.decode else 0

    @property
    def num_preemptions(self) -> int:
        """Running sequences that had to give their blocks back, since start."""
        return self.decode.num_preemptions if self.decode else 0

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed since start."""
        return self.decode.draft_tokens if self.decode else 0

    @property
    def accepted_tokens(self) -> int:
        """Tokens guessed since start that were right."""
        return self.decode.accepted_tokens if self.decode else 0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that were computed again after a preemption, since start."""
        return self.decode.recomputed_tokens if self.decode else 0


# -- router and decode -----------------------------------------------------------------------------------------------


@message(10)
@dataclass(frozen=True)
class Reserve:
    """Asks a decode worker for blocks: for the prompt and the beginning of the answer. Answered with Reserved or Failed."""

    call_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    """Prompt and, on a resumed stream, the tokens that were already emitted."""
    max_tokens: int
    """Most tokens of the answer. Blocks are taken for its beginning, but a whole that can never fit is refused."""
    cache_salt: str
    """Only requests with the same salt share cached KV; empty is a salt like any other."""
    trace: TraceContext
    """Trace of the request. The worker's log lines about the request carry its id."""
    own_tokens: int
    """Tokens at the prompt's end that must lie in blocks of the ticket's own, even if they are cached.

    0 if KV is sent for the prompt. 1 if it may be computed here, for the logits of its last token. All of them if the logits of
    every token are wanted.
    """
    share: Share = NOBODYS
    """The tenant's right to seats and blocks, beside those of other tenants."""
    displaces: bool = False
    """Whether streams may be preempted to make room for the request."""


@message(11)
@dataclass(frozen=True)
class Reserved:
    """The answer to `Reserve`: the blocks are the request's, under a lease."""

    call_id: int
    ticket: Ticket


@message(12)
@dataclass(frozen=True)
class Attach:
    """Lets a ticket's stream join the decode batch, as soon as its KV is committed. Answered with Attached or Failed."""

    call_id: int
    ticket_id: int
    first_token: int | None
    """Token that prefill sampled; its KV is the first that decode computes. None: nothing is sent, and the prompt is computed
    here."""
    sampling: SamplingParams
    num_generated: int
    """Tokens of the answer so far, the first token included if there is one; there are earlier ones on a resumed stream."""


@message(13)
@dataclass(frozen=True)
class Attached:
    """The answer to `Attach`: the stream is in the batch, or waits for its turn."""

    call_id: int
    waited_s: float
    """Seconds that `Attach` waited for the KV; 0 if it had arrived before."""


@message(14)
@dataclass(frozen=True)
class Release:
    """Gives a ticket back, in any state and for any reason. It has no answer and may be sent twice."""

    ticket_id: int


@dataclass(frozen=True)
class Prefilled:
    """What is told of a prompt with the first token after it, wherever it was computed."""

    prefill_s: float
    """Seconds from the prompt's first chunk to the first token."""
    cached_tokens: int
    """Tokens at the prompt's beginning whose KV was cached or fetched, and so not computed."""
    prompt_logprobs: PromptLogprobs | None
    """Logprobs of the prompt's tokens, if they were asked for and none of the answer was emitted before."""
    brought: Brought = NOTHING_BROUGHT
    """KV of the prompt that was brought from elsewhere before it was computed."""


@dataclass(frozen=True)
class StreamOutput:
    """What one step added to one stream. `error` set means that the stream ends here without a finish reason."""

    ticket_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Logprobs, one entry for each token; empty if they were not asked for."""
    finish_reason: FinishReason | None
    error: Failed | None
    prefilled: Prefilled | None = None
    """What the router is told about a prompt that was computed here, with its first token."""
    drafts: int = 0
    """Tokens that were guessed for this step. Of `token_ids`, all but the first were guessed right."""


@message(15)
@dataclass(frozen=True)
class TokenFrame:
    """What one step of a decode worker made for one router: an output for each of its streams that the step computed."""

    outputs: tuple[StreamOutput, ...]
    step_s: float
    """Seconds that the step took that made these tokens."""


@message(16)
@dataclass(frozen=True)
class Migrate:
    """Hand this attached ticket's stream over to another decode worker, without a token lost or said twice.

    Answered with Failed if that can't be; then the stream goes on where it is, unless it has ended or was released.
    """

    call_id: int
    ticket_id: int
    target: Ticket
    """Ticket at the target for all of the stream's tokens that the router has, but the newest, whose KV is not computed yet.
    Tokens that come meanwhile are added by the transfer."""


@message(17)
@dataclass(frozen=True)
class Migrated:
    """The KV is at the target, committed. All tokens were sent before this; the ticket here is gone."""

    call_id: int
    newest_token: int
    """The stream's newest token, which the router sends to the target with `Attach`."""
    num_generated: int
    """Tokens of the answer so far, that one included."""


@message(18)
@dataclass(frozen=True)
class Copy:
    """Send the KV of this attached ticket's stream to another decode worker as well, as far as the target's tokens go.

    Answered with Failed if that can't be. The stream goes on where it is in any case.
    """

    call_id: int
    ticket_id: int
    target: Ticket
    """Ticket at the target for the stream's first tokens, of which all KV was computed."""


@message(19)
@dataclass(frozen=True)
class Copied:
    """The KV is at the target, committed: it stays in the cache there when the ticket is released."""

    call_id: int


# -- router and prefill ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FetchFrom:
    """Another worker that probably holds more of a prompt's beginning than the one that computes it, and can give it."""

    worker: WorkerRef
    num_tokens: int
    """Tokens at the prompt's beginning that the other worker probably holds, in whole blocks."""


@message(20)
@dataclass(frozen=True)
class Prefill:
    """Has a prefill worker compute a prompt and push its KV to the ticket. Answered with FirstToken or Failed."""

    call_id: int
    request_id: str
    ticket: Ticket
    token_ids: tuple[int, ...]
    """Prompt and, on a resumed stream, the tokens that were already emitted."""
    num_generated: int
    """How many at the end of `token_ids` were emitted before; 0 for a fresh request."""
    sampling: SamplingParams
    cache_salt: str
    """Keeps cached prefixes of different tenants apart; the same as in the prompt's `Reserve`."""
    trace: TraceContext
    ahead: bool
    """Whether the prompt goes before those that are there. Between two that do, the others get a step."""
    fetch: FetchFrom | None = None
    """Blocks to fetch before the prompt is computed. What can't be had is computed."""


@message(21)
@dataclass(frozen=True)
class FirstToken:
    """Sent as soon as it is sampled. With a finish reason nothing is handed over and the ticket must be released."""

    call_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prefilled: Prefilled


@message(22)
@dataclass(frozen=True)
class Cancel:
    """Gives up a prompt at a prefill worker, in any state. It has no answer and may be sent twice."""

    request_id: str


# -- whoever has KV and decode ----------------------------------------------------------------------------------------------


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
