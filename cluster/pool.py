"""One role's workers as a state machine: how many there should be, how many there are, what to do about the difference.

    scale up ──► STARTING ──started──► READY ──scale down──► DRAINING ──drained──► gone
                    ▲  │ failed           │ died                 │ died ──────────► gone
                    └──┴──────────────────┘ next epoch
    scale down of a STARTING worker: gone at once

Pure: events come in as method calls, orders for the outside world go out as actions. An event that names a life (worker id
and epoch) which is over is ignored, so late news can't revive anybody. A worker id that comes back after a scale-down goes
on counting its epochs: (worker id, epoch) names one life for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages import Role, WorkerRef

MAX_WORKERS = 1024
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0


@dataclass(frozen=True)
class Start:
    """Begin this life after `delay_s` seconds. Answer: `started` or `lost`."""

    worker_id: str
    epoch: int
    delay_s: float


@dataclass(frozen=True)
class Drain:
    """Let this worker finish what it has. Answer: `drained`, also when the deadline for it has passed."""

    worker_id: str
    epoch: int


@dataclass(frozen=True)
class Remove:
    """End this life, whatever its state, and give back what it occupies. No answer."""

    worker_id: str
    epoch: int


Action = Start | Drain | Remove


@dataclass(frozen=True)
class _Member:
    """A worker that is not gone. `failures` counts the starts that failed since it was last READY."""

    index: int
    info: WorkerInfo
    failures: int = 0


class Pool:
    """The workers of one role. Between calls, exactly `desired` of them are not DRAINING."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.desired = 0
        self._members: dict[str, _Member] = {}
        self._epochs: dict[str, int] = {}

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers, by index."""
        return tuple(member.info for member in sorted(self._members.values(), key=lambda member: member.index))

    def settled(self) -> bool:
        """Every wanted worker takes requests."""
        ready = sum(info.state is WorkerState.READY for info in self.workers())
        return ready == self.desired

    def scale(self, workers: int) -> list[Action]:
        """Want `workers` from now on. Raises InvalidRequestError outside 1 to 1024.

        Scaling down takes workers that are not ready yet first, then the ones with the highest index.
        """
        if not 1 <= workers <= MAX_WORKERS:
            raise InvalidRequestError(
                f"{self.role.value} must be 1 to {MAX_WORKERS} workers, got {workers}", param=self.role.value
            )
        self.desired = workers
        active = [member for member in self._members.values() if member.info.state is not WorkerState.DRAINING]
        active.sort(key=lambda member: (member.info.state is not WorkerState.READY, member.index))
        actions: list[Action] = [self._begin(self._free_index()) for _ in range(workers - len(active))]
        actions += [self._dismiss(member) for member in reversed(active[workers:])]
        return actions

    def started(self, ref: WorkerRef, pids: tuple[int, ...], node: str) -> list[Action]:
        """This life listens at `ref` and takes requests from now on."""
        member = self._living(ref.worker_id, ref.epoch)
        if member is not None and member.info.state is WorkerState.STARTING:
            info = replace(member.info, state=WorkerState.READY, ref=ref, pids=pids, node=node)
            self._members[ref.worker_id] = replace(member, info=info, failures=0)
        return []

    def lost(self, worker_id: str, epoch: int, error: str) -> list[Action]:
        """This life ended or never began, for the reason in `error`."""
        member = self._living(worker_id, epoch)
        if member is None:
            return []
        if member.info.state is WorkerState.DRAINING:
            return [self._forget(member)]
        failures = member.failures + 1 if member.info.state is WorkerState.STARTING else 0
        # One failure may be an accident (the node went away meanwhile); only a row of them is worth waiting for.
        delay_s = min(FIRST_RETRY_S * 2.0 ** (failures - 2), MAX_RETRY_S) if failures >= 2 else 0.0
        info = self._fresh(worker_id, restarts=member.info.restarts + 1, last_error=error)
        self._members[worker_id] = replace(member, info=info, failures=failures)
        return [Start(worker_id, info.epoch, delay_s)]

    def drained(self, worker_id: str, epoch: int) -> list[Action]:
        """Nothing runs on this DRAINING worker any more, or it had its time."""
        member = self._living(worker_id, epoch)
        if member is None or member.info.state is not WorkerState.DRAINING:
            return []
        return [self._forget(member)]

    def _living(self, worker_id: str, epoch: int) -> _Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.info.epoch == epoch else None

    def _free_index(self) -> int:
        taken = {member.index for member in self._members.values()}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def _begin(self, index: int) -> Start:
        info = self._fresh(f"{self.role.value}-{index}", restarts=0, last_error=None)
        self._members[info.worker_id] = _Member(index, info)
        return Start(info.worker_id, info.epoch, 0.0)

    def _fresh(self, worker_id: str, restarts: int, last_error: str | None) -> WorkerInfo:
        epoch = self._epochs[worker_id] = self._epochs.get(worker_id, 0) + 1
        return WorkerInfo(worker_id, self.role, epoch, WorkerState.STARTING, None, (), None, restarts, last_error)

    def _dismiss(self, member: _Member) -> Action:
        if member.info.state is WorkerState.STARTING:
            return self._forget(member)
        info = replace(member.info, state=WorkerState.DRAINING)
        self._members[info.worker_id] = replace(member, info=info)
        return Drain(info.worker_id, info.epoch)

    def _forget(self, member: _Member) -> Remove:
        del self._members[member.info.worker_id]
        return Remove(member.info.worker_id, member.info.epoch)
