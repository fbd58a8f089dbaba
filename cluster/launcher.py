"""What the supervisor asks of whoever makes processes: cluster.ray.launcher, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.schema import ClusterConfig
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef


@dataclass(frozen=True)
class Started:
    """A worker that has started: where it listens, its processes and its node."""

    ref: WorkerRef
    pids: tuple[int, ...]
    """Process ids of the worker's ranks, in the order of the ranks."""
    node: str


class Process(Protocol):
    """One life of one worker. Every method raises TandemError if the process is gone."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by which `resume` finds this process. Called only after `start` has returned."""

    async def start(self) -> Started:
        """Start the worker: load the model and listen. Returns once the worker takes requests."""

    async def resume(self, names: Sequence[str]) -> None:
        """Take up a process that a former supervisor has started under these names. Takes the place of `start`."""

    async def run(self) -> None:
        """Return when the worker was stopped; raise when it died."""

    async def drain(self) -> None:
        """Let the worker finish what it has and take nothing new. Returns once nothing is left."""

    async def take_role(self, duty: Duty) -> None:
        """Have the worker do this work from now on, and send back what has not begun of any other."""

    async def stop(self) -> None:
        """Ask the worker to end. `run` returns when it has."""

    async def kill(self) -> None:
        """End all processes of this life by force. Idempotent; afterwards nothing of this life runs."""


class Launcher(Protocol):
    """Makes processes, on resources that belong to a worker id over all its lives."""

    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Process:
        """Return a process that begins with its `start` or `resume`. The call itself starts nothing.

        The worker is configured with `config`. It reserves the same as all workers of its role.
        """

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        """Take over from a former launcher: keep these lives and the resources of these workers, and remove all else."""

    async def release(self, worker_id: str) -> None:
        """Give the worker's resources back, once none of its lives needs them. Idempotent."""

    async def why_not_started(self, role: Role) -> str:
        """Say in words for people what keeps a worker of this role from starting."""
