"""What the controller tells routers about the cluster: which workers exist and which take new work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from protocol.messages import Role, WorkerRef


class WorkerState(Enum):
    """STARTING → READY → DRAINING → gone; a worker that dies goes back to STARTING with the next epoch."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


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
    """Why the former life ended, for `tandem status`."""
    quick_ends: int = 0
    """Number of former lives in a row that failed to start, or ended soon after they were ready."""
    start_delay_s: float = 0.0
    """Seconds that this life waited, or waits, before it begins."""
    term: int = 0
    """How often this life has changed its role."""

    @property
    def pid(self) -> int | None:
        """Of the rank that speaks for all."""
        return self.pids[0] if self.pids else None


@dataclass(frozen=True)
class ClusterView:
    """A snapshot; `version` grows with every change."""

    version: int
    workers: tuple[WorkerInfo, ...]
    wanted: Mapping[Role, int] = field(default_factory=dict)
    """Number of workers that there should be of each role that the cluster has."""
    stopping: bool = False
    """The cluster ends as soon as the requests that run have ended: no router lets in new ones."""
    routers: int | None = None
    """Number of routers that there should be; None where Ray Serve sizes them."""

    def usable(self, role: Role) -> tuple[WorkerRef, ...]:
        """Workers of this role that take new requests, by worker id."""
        ready = (w.ref for w in self.workers if w.role is role and w.state is WorkerState.READY and w.ref is not None)
        return tuple(sorted(ready, key=lambda ref: ref.worker_id))
