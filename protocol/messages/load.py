"""What a worker tells its clients of its work, its cache and its devices."""

from __future__ import annotations

from dataclasses import dataclass, fields

from protocol.codec import message
from protocol.messages.workers import WorkerLife

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

    It is sent when it changes (at most every 50 ms), and once a second anyway, to clients that want it. The
    properties answer for a worker of any role; what its roles don't have is 0.
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
    """Pushes of KV under way, to this worker and from it."""
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
