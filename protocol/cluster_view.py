"""What controller and routers tell each other: which workers exist and take new work, and what is asked of the routers.

Observations are told where the pools size themselves. All of their counts are since the router's start, so a message that is
lost costs nothing: the next one has it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protocol.messages import Role, WorkerRef


class WorkerState(Enum):
    """STARTING → READY → DRAINING → gone; a worker that dies goes back to STARTING with the next epoch.

    STANDBY is a worker that is up and belongs to no role until one is wanted.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STANDBY = "standby"


@dataclass(frozen=True)
class WorkerInfo:
    """One worker as the controller sees it. `ref` is None until its socket listens."""

    worker_id: str
    role: Role
    epoch: int
    state: WorkerState
    ref: WorkerRef | None
    pids: tuple[int, ...]
    """Of its ranks, the first one's first; empty until it is ready."""
    node: str | None
    restarts: int
    last_error: str | None
    """Why the former life ended, or what is to be said of a node that will go; for `tandem status`."""
    quick_ends: int = 0
    """Number of former lives in a row that failed to start, or ended soon after they were ready."""
    start_delay_s: float = 0.0
    """Seconds that this life waited, or waits, before it begins."""
    term: int = 0
    """How often this life has changed its role."""
    standby: bool = False
    """It belongs to no role until one is wanted."""
    leaves_at: float | None = None
    """When its node is gone, as was said, in seconds since 1970; None for a node that stays."""

    @property
    def pid(self) -> int | None:
        """Of the rank that speaks for all."""
        return self.pids[0] if self.pids else None


@dataclass(frozen=True)
class SizeDecision:
    """Sizes that the autoscaler has decided, and why."""

    at: float
    """Seconds since 1970."""
    sizes: Mapping[Role, int]
    reason: str


@dataclass(frozen=True)
class AutoscalerState:
    """What the autoscaler does."""

    paused: str | None
    """Why it is paused; None if it is not."""
    decisions: tuple[SizeDecision, ...]
    """The latest ones, the newest last."""
    num_decisions: int
    """Of the cluster's life."""
    problem: str | None = None
    """What kept the latest decision from being done in full."""


@dataclass(frozen=True)
class ClusterView:
    """A snapshot; `version` grows with every change."""

    version: int
    workers: tuple[WorkerInfo, ...]
    wanted: Mapping[Role, int] = field(default_factory=dict)
    """Number of workers that there should be of each role that the cluster has."""
    stopping: bool = False
    """The cluster ends as soon as the requests that run have ended: no router lets in new ones."""
    autoscaler: AutoscalerState | None = None
    """None where pools keep the sizes that operators give them."""
    routers: int | None = None
    """Number of routers that there should be; None where Ray Serve sizes them."""

    def usable(self, role: Role) -> tuple[WorkerRef, ...]:
        """Workers of this role that take new requests, by worker id."""
        ready = (w.ref for w in self.workers if w.role is role and w.state is WorkerState.READY and w.ref is not None)
        return tuple(sorted(ready, key=lambda ref: ref.worker_id))


@dataclass(frozen=True)
class WorkerSeen:
    """One life of a worker, as its latest load report says."""

    worker_id: str
    epoch: int
    role: Role
    busy_s: float
    """Seconds of computation since its start."""
    computed_tokens: int
    """Prompt tokens that it has computed since its start, in either role."""
    running: int
    waiting: int
    queued_tokens: int
    """Prompt tokens that are not computed yet."""
    kv_usage: float
    """Share of its KV pool that running requests hold, from 0 to 1."""
    step_s: float
    """Seconds of its latest decode step that computed nothing of a prompt; 0 before the first."""
    held_tokens: int
    """Tokens whose KV running requests hold."""


@dataclass(frozen=True)
class DemandCounts:
    """What was asked of a router, and how it was answered. A request with several choices counts once for each."""

    arrived: int = 0
    prompt_tokens: int = 0
    """Of requests that arrived."""
    squared_tokens: int = 0
    """Squares of their prompts' lengths."""
    ended: int = 0
    """Answers that came to their end."""
    answer_tokens: int = 0
    """Of answers that came to their end."""
    first_tokens: int = 0
    first_in_time: int = 0
    """First tokens within `slo.ttft`."""
    paced: int = 0
    """Ended answers of more than one token."""
    in_pace: int = 0
    """Those within `slo.tpot`."""


@dataclass(frozen=True)
class RouterObservation:
    """One router's counts, and the workers as it knows them."""

    router_id: str
    counts: DemandCounts
    waiting: int
    """Requests that wait for room."""
    workers: tuple[WorkerSeen, ...]
