"""What controller and routers tell each other: which workers exist and take new work, and what is asked of the routers.

Observations are told where the pools size themselves. All of their counts are since the router's start, so a message that is
lost costs nothing: the next one has it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from protocol.messages.workers import Duty, Role, WorkerRef

PAUSED_BY_HAND = "paused by hand"
SCALED_BY_HAND = "scaled by hand"
"""How the reasons begin for which the autoscaler is paused after an operator's order to pause it, and to scale."""


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
    """Process ids of the worker's ranks, the first rank's first; empty until the worker is ready."""
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
    revision: int = 1
    """Revision of the worker's configuration. Workers of one revision have the same one."""
    both: bool = False
    """It does the work of both roles, and counts as a decode worker."""

    @property
    def duty(self) -> Duty:
        """What it is asked for."""
        return Duty.BOTH if self.both else Duty(self.role.value)

    @property
    def pid(self) -> int | None:
        """Process id of the rank that speaks for all; None if it is not known."""
        return self.pids[0] if self.pids else None


@dataclass(frozen=True)
class SizeDecision:
    """Sizes that the autoscaler has decided, and why."""

    at: float
    """Time of the decision, in seconds since 1970."""
    sizes: Mapping[Role, int]
    reason: str


@dataclass(frozen=True)
class SizeChanges:
    """How often the autoscaler has changed the size of a role, since the cluster began."""

    role: Role
    up: int = 0
    """Number of decisions by which it has more workers."""
    down: int = 0
    """Number of decisions by which it has fewer."""


@dataclass(frozen=True)
class AutoscalerState:
    """State of the autoscaler: whether it is paused, and its latest decisions."""

    paused: str | None
    """Why it is paused; None if it is not."""
    decisions: tuple[SizeDecision, ...]
    """The latest ones, the newest last."""
    changes: tuple[SizeChanges, ...] = ()
    """How often it has changed the size of each role."""
    problem: str | None = None
    """What kept the latest decision from being done in full."""


class RolloutPhase(Enum):
    """STARTING → CANARY → REPLACING → DONE; from each of the first three → ROLLING_BACK → ROLLED_BACK."""

    STARTING = "starting"
    """The first workers of the new revision start. They get no requests."""
    CANARY = "canary"
    """A share of new requests goes to them, and they are compared with the others."""
    REPLACING = "replacing"
    """They were good: the others are replaced one by one."""
    DONE = "done"
    ROLLING_BACK = "rolling_back"
    """They get no new requests, and end; the former workers come back to their number."""
    ROLLED_BACK = "rolled_back"

    @property
    def is_over(self) -> bool:
        """Whether the rollout has ended, one way or the other."""
        return self in (RolloutPhase.DONE, RolloutPhase.ROLLED_BACK)


@dataclass(frozen=True)
class RolloutOrder:
    """What an operator wants: another configuration for workers, tried on a share of the requests first."""

    changes: Mapping[str, Any]
    """The configuration's keys that get other values, in sections as in the file."""
    canary: float
    """Share of new requests that the new workers get until they are judged."""
    watch_s: float
    """Seconds for which they are watched at least."""
    min_requests: int
    """Requests that they must have begun to answer at least before they are found good."""


@dataclass(frozen=True)
class RevisionFigures:
    """How the workers of one revision have done since the canary began. Times are in seconds, None without a request."""

    requests: int
    failures: int
    """Requests that failed at these workers, and went on elsewhere."""
    ttft_p50_s: float | None
    """Median time from the choice of the workers to the first token, in seconds; None without a request."""
    ttft_p90_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None


@dataclass(frozen=True)
class RolloutState:
    """The latest rollout of a configuration: the one that runs, or how it has ended."""

    revision: int
    """Revision of the new workers."""
    phase: RolloutPhase
    share: float
    """Share of new requests that go to the new workers now."""
    changes: tuple[str, ...]
    """Settings that the rollout changes, such as `quantization: auto -> int8`."""
    targets: Mapping[Role, int]
    """Number of workers of each role before it, and after it."""
    verdict: str
    """What is found out about the new workers so far, in words for people."""
    reason: str | None = None
    """Why it is, or was, rolled back; None if it is not."""
    figures: Mapping[str, RevisionFigures] = field(default_factory=dict)
    """How both revisions do, by `current` and `new`."""


@dataclass(frozen=True)
class RevisionCounts:
    """What a router has seen of the workers of one revision since a rollout began.

    Durations are counted in bins (`router.rules.rollout.duration_bins`).
    """

    requests: int = 0
    """Attempts that were given to a pair of these workers."""
    failures: int = 0
    """Attempts that failed there, but for those whose worker has died."""
    first_tokens: tuple[int, ...] = ()
    """First tokens, by the time from the choice of the pair on."""
    unanswered: tuple[int, ...] = ()
    """Attempts without a first token now, by their age."""
    paces: tuple[int, ...] = ()
    """Answers that have ended, by the mean time of a token after the first."""
    running_paces: tuple[int, ...] = ()
    """Answers that run now, likewise."""


@dataclass(frozen=True)
class RolloutObservation:
    """What one router has seen of both revisions during a rollout."""

    router_id: str
    revision: int
    """Revision of the new workers, which names the rollout."""
    current: RevisionCounts
    new: RevisionCounts


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
    revision: int = 1
    """Whose workers get the requests, but for those that `rollout` says."""
    rollout: RolloutState | None = None
    """The latest rollout of a configuration; None if there was none."""

    def usable(self, role: Role) -> tuple[WorkerRef, ...]:
        """Workers that do the work of this role and take new requests, by worker id."""
        ready = (w.ref for w in self.workers if w.duty.does(role) and w.state is WorkerState.READY and w.ref is not None)
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
    """Prompt tokens of the requests that arrived."""
    squared_tokens: int = 0
    """Squares of their prompts' lengths."""
    ended: int = 0
    """Answers that came to their end."""
    answer_tokens: int = 0
    """Tokens of the answers that came to their end."""
    first_tokens: int = 0
    first_in_time: int = 0
    """Number of first tokens that came within `slo.ttft`."""
    read_tokens: int = 0
    """Prompt tokens of the requests whose first token came: these were computed, or somebody had them cached."""
    paced: int = 0
    """Ended answers of more than one token."""
    in_pace: int = 0
    """Ended answers whose time per token was within `slo.tpot`."""


@dataclass(frozen=True)
class RouterObservation:
    """One router's counts, and the workers as it knows them."""

    router_id: str
    counts: DemandCounts
    waiting: int
    """Requests that wait for room."""
    workers: tuple[WorkerSeen, ...]
