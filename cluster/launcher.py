"""What the supervisor asks of whoever makes processes: cluster.ray.launcher, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import Role, WorkerLife, WorkerRef


@dataclass(frozen=True)
class Started:
    """Where a worker listens and runs."""

    ref: WorkerRef
    pids: tuple[int, ...]
    """Of its ranks, the first one's first."""
    node: str


class Process(Protocol):
    """One life of one worker. Every method raises TandemError if the process is gone."""

    @property
    def names(self) -> tuple[str, ...]:
        """By which `resume` finds it; once it has started."""

    async def start(self) -> Started: ...

    async def resume(self, names: Sequence[str]) -> None:
        """Instead of `start`: it was started by a former supervisor, under these names."""

    async def run(self) -> None:
        """Returns when the worker was stopped; raises when it died."""

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...

    async def kill(self) -> None:
        """Idempotent; afterwards nothing of this life runs."""


class Launcher(Protocol):
    """Makes processes, on resources that belong to a worker id over all its lives."""

    def process(self, role: Role, worker_id: str, epoch: int) -> Process:
        """A process that begins with its `start` or `resume`; cheap."""

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        """Of what a former launcher has made, know the resources of these workers, and remove all but them and these lives."""

    async def release(self, worker_id: str) -> None:
        """Give the worker's resources back, once none of its lives needs them. Idempotent."""

    async def why_not_started(self, role: Role) -> str:
        """What keeps a worker of this role from starting, for people."""
