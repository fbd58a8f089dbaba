"""The workers of a pool, what is kept of it, and the ids that all pools of a cluster give out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Remove, Start
from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.messages.workers import Role


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


class Members:
    """The workers of one pool, each under its id. What changes of one makes a new `Member`."""

    def __init__(self, ids: WorkerIds, members: Iterable[Member]) -> None:
        self._ids = ids
        self._by_id = {member.info.worker_id: member for member in members}
        for member in self._by_id.values():
            ids.take(member.index)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._by_id

    def __getitem__(self, worker_id: str) -> Member:
        return self._by_id[worker_id]

    def all(self) -> tuple[Member, ...]:
        """All of them, in the order in which they came."""
        return tuple(self._by_id.values())

    def in_order(self) -> list[Member]:
        """All of them, in the order of their index."""
        return sorted(self._by_id.values(), key=lambda member: member.index)

    def staying(self) -> list[Member]:
        """Those that are to stay, whatever they do now."""
        return [member for member in self._by_id.values() if not member.leaves]

    def ready(self) -> list[Member]:
        """Those that are to stay, and take requests."""
        return [member for member in self.staying() if member.info.state is WorkerState.READY]

    def any_ready_but(self, one: Member) -> bool:
        """Whether others take requests, also such as leave their nodes."""
        return any(other is not one and other.info.state is WorkerState.READY for other in self._by_id.values())

    def going(self) -> list[tuple[Member, Leaving]]:
        """Those that leave their nodes, in the order in which they should."""
        going = [(member, member.leaving) for member in self._by_id.values() if member.leaving is not None]
        return sorted(going, key=lambda each: (each[1].leaves_at, each[0].index))

    def living(self, worker_id: str, epoch: int) -> Member | None:
        """The worker, if this life of it is not over."""
        member = self._by_id.get(worker_id)
        return member if member is not None and member.info.epoch == epoch else None

    def put(self, member: Member, info: WorkerInfo) -> None:
        """Put this in the place of what was known of the worker, or add it, with this `info`."""
        self._by_id[info.worker_id] = replace(member, info=info)

    def begin(self, role: Role, revision: int, *, both: bool) -> Start:
        """Have one worker more, which starts."""
        index = self._ids.take()
        info = replace(self._first_of_life(f"worker-{index}", role, revision), both=both)
        self._by_id[info.worker_id] = Member(index, info)
        return Start(info.worker_id, info.epoch, 0.0)

    def begin_again(self, lost: Member, revision: int, reason: str, *, quick_ends: int, delay_s: float) -> Start:
        """Have the next life of a worker that was lost for this reason, with so many lives in a row that ended soon."""
        info = replace(
            self._first_of_life(lost.info.worker_id, lost.info.role, revision),
            restarts=lost.info.restarts + 1,
            last_error=reason,
            both=lost.info.both,
            quick_ends=quick_ends,
            start_delay_s=delay_s,
        )
        self.put(replace(lost, comes_back=False), info)
        return Start(info.worker_id, info.epoch, delay_s)

    def forget(self, member: Member) -> Remove:
        """Have it no more, whatever it does."""
        self.give_up(member)
        self._ids.give_back(member.index)
        return Remove(member.info.worker_id, member.info.epoch)

    def give_up(self, member: Member) -> None:
        """Leave it to another pool."""
        del self._by_id[member.info.worker_id]

    def _first_of_life(self, worker_id: str, role: Role, revision: int) -> WorkerInfo:
        return WorkerInfo(
            worker_id=worker_id,
            role=role,
            epoch=self._ids.next_epoch(worker_id),
            state=WorkerState.STARTING,
            ref=None,
            pids=(),
            node=None,
            restarts=0,
            last_error=None,
            revision=revision,
        )
