"""One role's workers as a state machine: how many there should be, how many there are, what to do about the difference.

    scale up ──► STARTING ──started──► READY ──scale down, drain──► DRAINING ──drained──► gone
                    ▲  │ failed           │ died                        │ died ─────────► gone
                    └──┴──────────────────┴──── restart: drained, died ─┘ next epoch
    scale down or drain of a STARTING worker: gone at once
    READY ──hand_over──► READY in the other role's pool, the same life, one term later (take)
    READY ──turn──► READY in the same pool, of which some do the other role's work, too; one term later
    READY ──hand_on_both──► READY, and does both in the place of one that is not READY
    READY ──leave──► READY, but no longer counted: another one begins in its place (begin_missing) ──due──► DRAINING ──► gone

A pool can be made from the record of a former one (`resume`): who was READY stays so, drains go on, and what was starting
begins anew, for nobody knows how far it came.

Pure: events come in as method calls, orders for the outside world go out as actions. An event that names a life (worker id
and epoch) which is over is ignored, so late news can't revive anybody. A worker's id says nothing of its role. One that comes
back after a scale-down goes on counting its epochs: (worker id, epoch) names one life for ever.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.nodes.leaving import Leaving, which_drain
from cluster.pools.actions import Action, Drain, Resume, Start, Stop, TakeRole
from cluster.pools.members import NO_WORKERS, Member, Members, PoolRecord, WorkerIds
from cluster.pools.pauses import STEADY_S, pause_s
from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty, Role, WorkerRef

MAX_WORKERS = 1024


class Pool:
    """The workers of one role. Between calls, exactly `desired` of them stay; fewer only while `num_missing` says so."""

    def __init__(
        self, role: Role, ids: WorkerIds, record: PoolRecord = NO_WORKERS, *, least: int = 1, revision: int = 1
    ) -> None:
        """`ids` are shared with the other pools. `least`: 0 where the last worker may go as well, else 1. `revision`: of the
        configuration of its workers."""
        self.role = role
        self.revision = revision
        self.least = least
        self.desired = record.desired
        self._both = record.both
        self._members = Members(ids, record.members)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._members

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers of the pool, in the order of their index."""
        return tuple(member.info for member in self._members.in_order())

    def record(self) -> PoolRecord:
        """The pool's present state as a record, from which another pool can be made."""
        return PoolRecord(self.desired, self._members.all(), self._both)

    def resume(self) -> list[Action]:
        """Go on where the former pool, from whose record this one was made, has ended. Call it once, before anything else."""
        actions: list[Action] = []
        for info in self.workers():
            if info.state is WorkerState.STARTING:
                actions += self.lost(info.worker_id, info.epoch, "the controller ended while it started")
            else:
                actions.append(Resume(info.worker_id, info.epoch))
        return actions

    def settled(self) -> bool:
        """Whether every wanted worker takes requests."""
        return self.num_unready == 0

    def scale(self, workers: int) -> list[Action]:
        """Want `workers` from now on. Raises InvalidRequestError for fewer than the least, or more than 1024.

        Scaling down takes workers that are not ready yet first, then the ones with the highest index. Of those that are equally
        ready, those that do both go last.
        """
        if not self.least <= workers <= MAX_WORKERS:
            raise InvalidRequestError(
                f"{self.role.value} must be {self.least} to {MAX_WORKERS} workers, got {workers}", param=self.role.value
            )
        missing, self.desired = self.num_missing, workers
        active = self._members.staying()
        active.sort(key=lambda member: (member.info.state is not WorkerState.READY, not member.info.both, member.index))
        actions: list[Action] = [self._begin() for _ in range(workers - len(active) - missing)]
        for member in reversed(active[workers:]):
            actions += self._dismiss(member)
        self._both = min(self._both, self.num_both + self.num_missing)
        return actions

    def drain(self, worker_id: str, *, restart: bool) -> list[Action]:
        """Let a worker go when it has given its work away: it starts anew, or one worker less is wanted from now on.

        It must be one of this pool's. Idempotent. Raises InvalidRequestError if its role can't do with one worker less, or
        for a restart of one that goes for good.
        """
        member = self._members[worker_id]
        if restart and member.leaving is not None:
            raise InvalidRequestError(f"{worker_id} goes with its node, and another one takes its place", param="worker")
        if restart and member.leaves:
            raise InvalidRequestError(f"{worker_id} drains for good: it will not start again", param="worker")
        if restart:
            ready = member.info.state is WorkerState.READY  # else it is about to start
            return [self._begin_drain(member, comes_back=True)] if ready else []
        if member.leaves:
            return []
        if self.desired <= self.least:
            raise InvalidRequestError(
                f"{worker_id} is the only {self.role.value} worker that is wanted: add another first, or restart it",
                param="worker",
            )
        if self.least and self._members.ready() == [member]:
            problem = f"{worker_id} is the only {self.role.value} worker that is ready: wait for another, or restart it"
            raise InvalidRequestError(problem, param="worker")
        self._want_less(member)
        return self._dismiss(member)

    @property
    def num_unready(self) -> int:
        """Number of workers that are to stay, or are missing, and are not READY: the first to go when fewer are wanted."""
        return self.num_missing + sum(member.info.state is not WorkerState.READY for member in self._members.staying())

    @property
    def num_missing(self) -> int:
        """Number of workers that are wanted in place of those that leave their nodes, and have not begun."""
        return max(0, self.desired - self.num_staying)

    @property
    def num_ready(self) -> int:
        """Number of workers that are to stay, and take requests."""
        return len(self._members.ready())

    @property
    def num_staying(self) -> int:
        """Number of workers that are to stay, whatever they do now."""
        return len(self._members.staying())

    @property
    def num_placed(self) -> int:
        """Number of workers on nodes that stay, those that drain there among them."""
        return sum(member.leaving is None for member in self._members.all())

    @property
    def num_both(self) -> int:
        """Number of workers that are to stay and do the work of both roles."""
        return sum(member.info.both for member in self._members.staying())

    @property
    def both_wanted(self) -> int:
        """Number of workers that are to do the work of both roles: `num_both`, and those that are missing."""
        return self._both

    def both_ready(self) -> list[str]:
        """The ids of those of them that take requests."""
        return [member.info.worker_id for member in self._members.ready() if member.info.both]

    def duty_of(self, worker_id: str) -> Duty:
        """What a worker of this pool is asked for."""
        return self._members[worker_id].info.duty

    def spare(self) -> str | None:
        """The id of the worker that is the first to go over to another role: the READY one with the highest index, of those
        that do not do both already. None if no other one is READY, and its role can't do without any.
        """
        ready = self._members.ready()
        if len(ready) <= self.least:
            return None
        return max(ready, key=lambda member: (not member.info.both, member.index)).info.worker_id

    def hand_over(self, worker_id: str) -> Member:
        """Give a READY worker of this pool up to the pool of another role, with one worker less wanted here from now on.

        Raises InvalidRequestError if it is not READY, leaves its node, or if its role can't do without it.
        """
        member = self._to_flip(worker_id)
        if self.desired <= self.least:
            raise InvalidRequestError(
                f"{worker_id} is the only {self.role.value} worker that is wanted: add another first", param="worker"
            )
        if self.spare() is None:
            raise InvalidRequestError(f"{worker_id} is the only {self.role.value} worker that is ready", param="worker")
        self._want_less(member)
        self._members.give_up(member)
        return member

    def take(self, member: Member, *, both: bool = False) -> Duty:
        """Have a worker of another pool from now on: the same life, in another role. Return what it is asked for."""
        self.desired += 1
        self._both += both
        return self._give(member, both=both)

    def turn(self, worker_id: str, *, both: bool) -> list[Action]:
        """Have a READY worker do the other role's work, too, or no more. Raises InvalidRequestError if it is not READY, or
        leaves its node.
        """
        member = self._to_flip(worker_id)
        self._both += 1 if both else -1
        return [TakeRole(worker_id, member.info.epoch, self._give(member, both=both))]

    def hand_on_both(self) -> list[Action]:
        """Where some are to do both, of whom none is READY, have another one that is READY do so in the place of one."""
        ready = self._members.ready()
        if not self._both or not ready:
            return []
        if self.num_both == self._both:
            late = next(member for member in self._members.staying() if member.info.both)  # it has nothing, or gives it away
            self._members.put(late, replace(late.info, both=False))
        heir = max(ready, key=lambda member: member.index)
        return [TakeRole(heir.info.worker_id, heir.info.epoch, self._give(heir, both=True))]

    def leave(self, worker_id: str, epoch: int, told: Leaving) -> list[Action]:
        """Have this life leave its node, which will go. Idempotent; what is said later about the same node counts.

        It takes requests until it is `due`. Another worker is wanted in its place (`num_missing`). One that is STARTING is gone
        at once.
        """
        member = self._members.living(worker_id, epoch)
        if member is None or (member.leaving is not None and member.leaving.leaves_at == told.leaves_at):
            return []
        if member.info.state is WorkerState.STARTING:
            return [self._members.forget(member)]
        info = replace(member.info, leaves_at=told.leaves_at, last_error=told.in_words())
        self._members.put(replace(member, comes_back=False, leaving=told), info)
        return []

    def begin_missing(self) -> list[Action]:
        """Begin one worker in the place of one that leaves its node."""
        return [self._begin()] if self.num_missing else []

    def due(self, now: float, no_room: str | None, *, others_ready: int = 0) -> list[Action]:
        """What is to happen by now (seconds since 1970) to workers whose nodes will go.

        `no_room` says why no other worker can begin in their place, None if one can. `others_ready` of the role take
        requests in other pools, and stay.
        """
        actions: list[Action] = [self._members.forget(member) for member, told in self._members.going() if now >= told.end_by]
        ready = [(member, told) for member, told in self._members.going() if member.info.state is WorkerState.READY]
        told_ready, num_starting = [told for _, told in ready], self.num_staying - self.num_ready
        drains = which_drain(
            told_ready, self.num_ready, self.desired, now, num_starting=num_starting, others_ready=others_ready
        )
        actions += [
            self._begin_drain(member, comes_back=False) for (member, _), drain in zip(ready, drains, strict=True) if drain
        ]
        for member, told in self._members.going():
            self._members.put(member, replace(member.info, last_error=told.in_words(no_room)))
        return actions

    @property
    def num_leaving(self) -> int:
        """Number of workers that leave their nodes, and have not left yet."""
        return len(self._members.going())

    @property
    def any_leaving(self) -> bool:
        """Whether workers leave their nodes, or are missing because some have."""
        return bool(self._members.going() or self.num_missing)

    def started(self, ref: WorkerRef, pids: tuple[int, ...], node: str) -> list[Action]:
        """This life listens at `ref` and takes requests from now on."""
        member = self._members.living(ref.worker_id, ref.epoch)
        if member is not None and member.info.state is WorkerState.STARTING:
            info = replace(member.info, state=WorkerState.READY, ref=ref, pids=pids, node=node)
            self._members.put(member, info)
        return []

    def resumed(self, worker_id: str, epoch: int) -> list[Action]:
        """This life is still up."""
        member = self._members.living(worker_id, epoch)
        draining = member is not None and member.info.state is WorkerState.DRAINING
        return [Drain(worker_id, epoch)] if draining else []

    def lost(self, worker_id: str, epoch: int, error: str, ready_s: float = 0.0) -> list[Action]:
        """This life ended for the reason in `error`, after it was READY for `ready_s` seconds; 0 means that it never was.

        A worker whose lives end soon, one after the other, waits longer and longer before the next one.
        """
        member = self._members.living(worker_id, epoch)
        if member is None:
            return []
        if member.leaves:
            return [self._members.forget(member)]
        quick_ends = member.info.quick_ends + (0 if member.comes_back else 1) if ready_s < STEADY_S else 0
        was_ready = member.info.state is WorkerState.READY
        if member.comes_back:
            reason, delay_s = "restarted on request", 0.0
        else:
            reason = error
            delay_s = pause_s(quick_ends, spares_others=was_ready and self._members.any_ready_but(member))
        return [self._members.begin_again(member, self.revision, reason, quick_ends=quick_ends, delay_s=delay_s)]

    def drained(self, worker_id: str, epoch: int) -> list[Action]:
        """Nothing runs on this DRAINING worker any more, or it had its time."""
        member = self._members.living(worker_id, epoch)
        if member is None or member.info.state is not WorkerState.DRAINING:
            return []
        return [Stop(worker_id, epoch) if member.comes_back else self._members.forget(member)]

    def _to_flip(self, worker_id: str) -> Member:
        """The worker, which must be READY and stay on its node."""
        member = self._members[worker_id]
        if member.info.state is not WorkerState.READY:
            raise InvalidRequestError(f"{worker_id} is {member.info.state.value}: only a ready worker flips", param="worker")
        if member.leaves:
            raise InvalidRequestError(f"{worker_id} goes with its node, and another one takes its place", param="worker")
        return member

    def _give(self, member: Member, *, both: bool) -> Duty:
        info = replace(member.info, role=self.role, both=both, term=member.info.term + 1)
        self._members.put(member, info)
        return info.duty

    def _begin(self) -> Start:
        """Begin one worker more. The one in whose place it comes, if any, may have done both."""
        return self._members.begin(self.role, self.revision, both=self.num_both < self._both)

    def _want_less(self, member: Member) -> None:
        """Want one worker less: this one."""
        self.desired -= 1
        self._both -= member.info.both

    def _dismiss(self, member: Member) -> list[Action]:
        if member.info.state is WorkerState.STARTING:
            return [self._members.forget(member)]
        if member.comes_back:  # it drains already, but now for good
            self._members.put(replace(member, comes_back=False), member.info)
            return []
        return [self._begin_drain(member, comes_back=False)]

    def _begin_drain(self, member: Member, *, comes_back: bool) -> Drain:
        self._members.put(replace(member, comes_back=comes_back), replace(member.info, state=WorkerState.DRAINING))
        return Drain(member.info.worker_id, member.info.epoch)
