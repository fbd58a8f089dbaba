"""The workers of a pool, what is kept of it, and the ids that all pools of a cluster give out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.nodes.leaving import Leaving
from protocol.cluster_view import WorkerInfo, WorkerState


@dataclass(frozen=True)
class Member:
    """A worker that is not gone."""

    index: int
    info: WorkerInfo
    comes_back: bool = False
    """Whether the worker is DRAINING in order to be started anew."""
    leaving: Leaving | None = None
    """What was said of its node, if that will go."""

    @property
    def leaves(self) -> bool:
        """Whether the worker is DRAINING and will not come back, or is to leave its node."""
        return self.leaving is not None or (self.info.state is WorkerState.DRAINING and not self.comes_back)


@dataclass(frozen=True)
class PoolRecord:
    """All that a pool knows: another pool can be made from it."""

    desired: int = 0
    members: tuple[Member, ...] = ()
    both: int = 0
    """How many of the wanted workers do the work of both roles."""


NO_WORKERS = PoolRecord()


class WorkerIds:
    """The ids of the workers of all pools of a cluster: `worker-3` is the same worker in any role."""

    def __init__(self, epochs: Mapping[str, int] | None = None) -> None:
        """`epochs` has the last epoch of every worker id that there ever was."""
        self.epochs = dict(epochs or {})
        self._taken: set[int] = set()

    def take(self, index: int | None = None) -> int:
        """Take the index of a worker, the lowest that is free if none is given."""
        if index is None:
            index = next(each for each in itertools.count() if each not in self._taken)
        self._taken.add(index)
        return index

    def give_back(self, index: int) -> None:
        """Let another worker have the index."""
        self._taken.discard(index)

    def next_epoch(self, worker_id: str) -> int:
        """The epoch of the next life of a worker."""
        self.epochs[worker_id] = self.epochs.get(worker_id, 0) + 1
        return self.epochs[worker_id]
