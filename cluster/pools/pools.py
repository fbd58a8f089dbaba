"""The pools of both roles together: how many workers each should have, and who goes over from one to the other.

Pure, as `cluster.pools.pool` is: wishes and events come in, orders for the outside world go out. Where workers of the two
roles are not alike, they stay in theirs.

    STANDBY ──a role wants more──► its pool ──a role wants fewer, and a standby is missing──► STANDBY

A worker whose node will go stays until another one is ready in its place, or until it has to go (`heed`).

While a new configuration is rolled out (cluster.rollout), each role has a second pool, of the workers that have it: the new
revision. In the end one of the two revisions is empty, and forgotten.

A decode worker that does the work of both roles is one more decode worker in every number, but for one thing: while one is
ready, prefill can do without workers of its own. Where one is to do both, and nobody who is READY computes prompts, a decode
worker that is READY does so at once, in the place of one that is not.

Workers on standby (`autoscale.standby`) are up and have the model. They are a pool of their own, which counts as one of decode
workers to whom nobody gives work; going over from it is a flip, and as quick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, TakeRole
from cluster.pools.members import NO_WORKERS, PoolRecord, WorkerIds
from cluster.pools.pool import Pool
from cluster.pools.revisions import ONE_REVISION, Numbers, RevisionsRecord, numbers_of
from cluster.ray.placement import pool_of
from configs.schema import ClusterConfig
from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty, Role, WorkerLife

CheckRoom = Callable[[Mapping[Role, int], Collection[Role]], None]
"""Raises InvalidRequestError, naming one of the second argument's roles, if the first one's workers can't all be had."""


class Pools:
    """All workers of a cluster, by role. A worker is in one pool at a time."""

    def __init__(
        self,
        config: ClusterConfig,
        records: Mapping[Role, PoolRecord] | None = None,
        standby: PoolRecord | None = None,
        epochs: Mapping[str, int] | None = None,
        revisions: RevisionsRecord = ONE_REVISION,
    ) -> None:
        """`config` is what the cluster was started with. The others are those of former pools, if there were some."""
        self._config = revisions.config or config
        self._changed = revisions.config
        self.new_config = revisions.new_config
        """That of the new revision, while there is one."""
        self.revision, self.latest = revisions.current, revisions.latest
        """The current revision, and the latest that there ever was."""
        self._ids = WorkerIds(epochs)
        self._pools = {role: self._pool(role, (records or {}).get(role), self.revision) for role in Role}
        self._standby = Pool(Role.DECODE, self._ids, standby or NO_WORKERS, least=0, revision=self.revision)
        self._new: dict[Role, Pool] = {}
        """Of the new revision, while there is one."""
        if self.new_config is not None:
            self._new = {role: self._pool(role, revisions.new_pools.get(role), self.latest) for role in Role}
        self.roles = [role for role in Role if config.disaggregation != "never" or role is Role.DECODE]
        """Those that the cluster has."""

    @property
    def epochs(self) -> Mapping[str, int]:
        """The last epoch of every worker id that there ever was."""
        return self._ids.epochs

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers, those of prefill first, those on standby last."""
        serving = tuple(info for pool in self._serving() for info in pool.workers())
        waiting = (
            replace(info, standby=True, state=WorkerState.STANDBY if info.state is WorkerState.READY else info.state)
            for info in self._standby.workers()
        )
        return (*serving, *waiting)

    def wanted(self) -> dict[Role, int]:
        """How many workers there should be of each role that the cluster has."""
        return {role: sum(pool.desired for pool in self._serving() if pool.role is role) for role in self.roles}

    def records(self) -> dict[Role, PoolRecord]:
        """Return the record of each role's pool, from which another controller makes its pools."""
        return {role: pool.record() for role, pool in self._pools.items()}

    def standby_record(self) -> PoolRecord:
        """What the pool of the workers on standby can be made from."""
        return self._standby.record()

    def ready(self) -> dict[Role, int]:
        """How many workers of each role take requests, and stay."""
        return {role: sum(pool.num_ready for pool in self._serving() if pool.role is role) for role in self.roles}

    def settled(self) -> bool:
        """Whether every wanted worker takes requests."""
        return all(pool.settled() for pool in self._pools.values())

    def start(self) -> list[Action]:
        """Want the configured number of workers."""
        actions = [action for role in self.roles for action in self._pools[role].scale(pool_of(self._config, role).workers)]
        return actions + self._standby.scale(self._config.autoscale.standby)

    def resume(self) -> list[Action]:
        """Go on where the former pools have ended. Call it once, before anything else."""
        return [action for pool in (*self._serving(), self._standby) for action in pool.resume()]

    def scale(self, sizes: Mapping[Role, int], check_room: CheckRoom) -> list[Action]:
        """Want this many workers of these roles. Where one gives up what the other takes, workers go over.

        Where there is no room for as many on standby as there should be, those that go over from there are not replaced
        (`fill_standby`). Raises InvalidRequestError for a role that the cluster lacks, for fewer or more than are allowed, and
        what `check_room` raises; then nothing has changed.
        """
        present = self.wanted()
        both = self._both_with(sizes.get(Role.DECODE, present[Role.DECODE]))
        self._spare_prefill(both)
        for role, workers in sizes.items():
            if role not in self.roles:
                raise InvalidRequestError("this cluster is colocated: its decode workers compute the prompts", param=role.value)
            least, most = min(self._pools[role].least, present[role]), pool_of(self._config, role).max_workers
            if not least <= workers <= most:
                problem = f"{role.value} must be {least} to {most} workers ({role.value}.max_workers), got {workers}"
                raise InvalidRequestError(problem, param=role.value)
        prefill = {**present, **sizes}.get(Role.PREFILL, 1)
        if not both and not prefill and self._config.autoscale.least(Role.PREFILL.value):
            raise InvalidRequestError("nobody would be left who computes prompts: want a prefill worker, too", param="decode")
        fills = self._has_room({**present, **sizes}, sizes, check_room)
        actions = self._flips_towards({**present, **sizes})
        actions += self._from_standby(sizes) + self._to_standby(sizes)
        for role, workers in sizes.items():
            actions += self._pools[role].scale(workers)
        standby = self._config.autoscale.standby
        return actions + self._standby.scale(standby if fills else min(standby, self._standby.desired)) + self._hand_on_both()

    def fill_standby(self, check_room: CheckRoom) -> list[Action]:
        """Begin the workers that are missing on standby, as far as there is room for them."""
        actions: list[Action] = []
        while self._standby.desired < self._config.autoscale.standby:
            placed, wanted = self._placed(), _with(self.wanted(), self._standby.desired)
            sizes = {role: max(placed[role], wanted[role]) for role in self.roles}
            try:
                check_room(_with(sizes, 1), (Role.DECODE,))
            except InvalidRequestError:
                break
            actions += self._standby.scale(self._standby.desired + 1)
        return actions

    def with_standby(self, sizes: Mapping[Role, int]) -> dict[Role, int]:
        """Sizes as they count for the room that they take."""
        return _with(sizes, self._config.autoscale.standby)

    def with_few_on_standby(self, sizes: Mapping[Role, int]) -> dict[Role, int]:
        """Return sizes as they count for the room that they take, where workers that go over from standby are not replaced."""
        present = self.wanted()
        more = sum(max(0, workers - present[role]) for role, workers in sizes.items()) - self._flips({**present, **sizes})[0]
        return _with(sizes, self._standby.desired - min(more, self._standby.num_ready))

    def drain(self, worker_id: str, *, restart: bool) -> list[Action]:
        """Let a worker go, or start anew, when it has given its work away.

        Raises InvalidRequestError if there is no such worker, or if it can't be spared.
        """
        pool = self._pool_with(worker_id)
        if pool is self._standby and not restart:
            raise InvalidRequestError(f"{worker_id} is on standby and has no work; it can be restarted", param="worker")
        if not restart:
            self._check_others_compute(worker_id)
        return pool.drain(worker_id, restart=restart) + self._hand_on_both()

    def heed(
        self,
        told: Mapping[WorkerLife, Leaving],
        now: float,
        check_room: CheckRoom,
        check_growing: CheckRoom | None = None,
    ) -> list[Action]:
        """Have these lives leave their nodes, which will go, and go on with those that do so already.

        `now` is in seconds since 1970. Others begin in their place as far as `check_room` finds room for them on the nodes that
        stay. In the place of those that have left, they do as far as `check_growing` finds some, on nodes that may join.
        """
        actions: list[Action] = []
        for life, leaving in told.items():
            pool = self._find(life.worker_id)
            actions += [] if pool is None else pool.leave(*life, leaving)
        actions += self._hand_on_both()
        for pool in (*self._serving(), self._standby):
            begun, no_room = self._begin_missing(pool, check_room, check_growing or check_room)
            others = [each for each in self._serving() if each.role is pool.role and each.revision != pool.revision]
            actions += begun + pool.due(now, no_room, others_ready=sum(each.num_ready for each in others))
        return actions

    @property
    def any_leaving(self) -> bool:
        """Whether workers leave their nodes, or are missing because some have."""
        return any(pool.any_leaving for pool in (*self._serving(), self._standby))

    def _begin_missing(self, pool: Pool, check_room: CheckRoom, check_growing: CheckRoom) -> tuple[list[Action], str | None]:
        """As many as there is room for, and why there is none for the next one."""
        actions: list[Action] = []
        while pool.num_missing:
            sizes = self._placed()
            check = check_growing if pool.num_missing > pool.num_leaving else check_room
            try:
                check({**sizes, pool.role: sizes[pool.role] + 1}, (pool.role,))
            except InvalidRequestError as error:
                return actions, error.message
            actions += pool.begin_missing()
        return actions, None

    def flip(self, worker_id: str, duty: Duty) -> list[Action]:
        """Have a worker do this work from now on. Streams and prompts that are no part of it go elsewhere.

        Raises InvalidRequestError if there is no such worker, if it is not ready or can't be spared, or if workers of the two
        roles differ in more than what they do.
        """
        pool, role = self._pool_with(worker_id), duty.role
        if pool is self._standby:
            raise InvalidRequestError(f"{worker_id} is on standby: scale {role.value} up, and it is taken", param="worker")
        if pool.duty_of(worker_id) is duty:
            return []
        if (problem := self.why_not_alike()) is not None:
            raise InvalidRequestError(f"no worker can flip: {problem}", param="role")
        if duty.does(Role.PREFILL):
            self._spare_prefill(1)  # it goes on with prompts itself
        else:
            self._check_others_compute(worker_id)
        if pool.role is role:
            return pool.turn(worker_id, both=duty is Duty.BOTH) + self._hand_on_both()
        if self._pools[role].desired >= (most := pool_of(self._config, role).max_workers):
            problem = f"there are {most} {role.value} workers already ({role.value}.max_workers)"
            raise InvalidRequestError(problem, param="role")
        return self._hand_over(worker_id, pool, self._pools[role], both=duty is Duty.BOTH) + self._hand_on_both()

    def begin_revision(self, config: ClusterConfig) -> list[Action]:
        """Have a new revision, with this configuration and no workers yet. There must be no other one."""
        assert self.new_config is None, "one rollout at a time"
        self.latest, self.new_config = self.latest + 1, config
        self._new = {role: self._pool(role, None, self.latest) for role in Role}
        return []

    def size_revisions(self, current: Mapping[Role, int], new: Mapping[Role, int]) -> list[Action]:
        """Want this many workers of each role in both revisions, which may be none of one of them."""
        actions: list[Action] = []
        for sizes, pools in ((current, self._pools), (new, self._new)):
            for role, workers in sizes.items():
                pools[role].least = 0
                actions += pools[role].scale(workers) if workers != pools[role].desired else []
        return actions

    def end_revision(self, *, taken: bool) -> list[Action]:
        """Forget the new revision, which must have no workers; or, if it is `taken`, the current one in its place."""
        assert self.new_config is not None, "there is one"
        if taken:
            self._pools, self.revision = self._new, self.latest
            self._config = self._changed = self.new_config
            self._standby.revision = self.revision
        for role, pool in self._pools.items():
            pool.least = self._config.autoscale.least(role.value)
        self._new, self.new_config = {}, None
        return []

    def numbers(self) -> tuple[dict[Role, Numbers], dict[Role, Numbers]]:
        """How many workers of each role there are, of the current revision and of the new one."""
        return numbers_of(self._pools, self.roles), numbers_of(self._new, self.roles)

    def revisions_record(self) -> RevisionsRecord:
        """What other pools must know of the revisions."""
        records = {role: pool.record() for role, pool in self._new.items()}
        return RevisionsRecord(self.revision, self.latest, self._changed, self.new_config, records)

    @property
    def config(self) -> ClusterConfig:
        """The configuration of the current revision."""
        return self._config

    def config_of(self, worker_id: str) -> ClusterConfig:
        """The configuration of a worker. Raises InvalidRequestError if there is no such worker."""
        if self.new_config is not None and self._pool_with(worker_id).revision == self.latest:
            return self.new_config
        return self._config

    def duty_of(self, worker_id: str) -> Duty:
        """What a worker is asked for now. Raises InvalidRequestError if there is no such worker."""
        return self._pool_with(worker_id).duty_of(worker_id)

    @property
    def both_wanted(self) -> int:
        """Number of workers that are to do the work of both roles."""
        return self._pools[Role.DECODE].both_wanted

    @property
    def both_ready(self) -> int:
        """Number of workers that do so, stay, and take requests."""
        return len(self._pools[Role.DECODE].both_ready())

    @property
    def both_likely(self) -> int:
        """Number of workers that do so and take requests, or will soon. One that drains does not count, nor one whose starts
        fail.
        """
        both = [info for info in self._pools[Role.DECODE].workers() if info.both]
        starting = [info for info in both if info.state is WorkerState.STARTING and not info.quick_ends]
        return len(starting) + sum(info.state is WorkerState.READY for info in both)

    def tell(self, worker_id: str, event: Callable[[Pool], list[Action]]) -> list[Action]:
        """Tell the pool that a worker is in now what has become of it. Of a worker in none, nobody wants to hear."""
        pool = self._find(worker_id)
        return [] if pool is None else event(pool) + self._hand_on_both()

    def _has_room(self, wanted: Mapping[Role, int], asked: Collection[Role], check_room: CheckRoom) -> bool:
        """Whether there is room for these sizes and all that should be on standby.

        Raises what `check_room` raises if there is none even for the sizes alone, and they are larger than the present ones.
        """
        present = self.wanted()
        grows = any(wanted[role] > present[role] for role in wanted)
        if not grows and self._standby.desired >= self._config.autoscale.standby:
            return True
        try:
            check_room(self.with_standby(wanted), tuple(asked) or (Role.DECODE,))
        except InvalidRequestError:
            if grows:
                check_room(self.with_few_on_standby(wanted), tuple(asked))
            return False
        return True

    def _placed(self) -> dict[Role, int]:
        """How many workers there are on nodes that stay, those that drain there among them."""
        sizes = {role: sum(each.num_placed for each in self._serving() if each.role is role) for role in self.roles}
        return _with(sizes, self._standby.num_placed)

    def _flips(self, wanted: Mapping[Role, int]) -> tuple[int, Role, Role]:
        """How many workers may go over for these sizes, from which role, and to which."""
        if self.why_not_alike() is not None:
            return 0, Role.DECODE, Role.DECODE
        surplus = {role: self._pools[role].desired - wanted[role] for role in self.roles}
        giving, taking = sorted(self.roles, key=lambda role: -surplus[role])
        return max(0, min(surplus[giving] - self._pools[giving].num_unready, -surplus[taking])), giving, taking

    def _flips_towards(self, wanted: Mapping[Role, int]) -> list[Action]:
        number, giving, taking = self._flips(wanted)
        actions: list[Action] = []
        for _ in range(number):
            worker_id = self._pools[giving].spare()
            if worker_id is not None:
                actions += self._hand_over(worker_id, self._pools[giving], self._pools[taking])
        return actions

    def _hand_over(self, worker_id: str, giving: Pool, taking: Pool, *, both: bool = False) -> list[Action]:
        member = giving.hand_over(worker_id)
        return [TakeRole(worker_id, member.info.epoch, taking.take(member, both=both))]

    def _spare_prefill(self, both: int) -> None:
        """Let the last prefill worker go, too, if so many workers are left that do both."""
        if not self._new:
            self._pools[Role.PREFILL].least = 0 if both else self._config.autoscale.least(Role.PREFILL.value)

    def _both_with(self, decode: int) -> int:
        """How many workers do both, or will, if so many decode workers are wanted: those go last. Prefill workers go only where
        one is READY.
        """
        pool = self._pools[Role.DECODE]
        if self.wanted().get(Role.PREFILL):
            return min(self.both_ready, decode)
        return min(pool.both_wanted if decode > pool.num_staying else pool.num_both, decode)

    def _check_others_compute(self, worker_id: str) -> None:
        """See to it that somebody computes prompts for others when this worker does so no more.

        Raises InvalidRequestError if it does both, and no other ready worker does, nor one of prefill. Of prefill workers
        themselves, their pool keeps one where nobody does both.
        """
        decode = self._pools[Role.DECODE]
        others = [each for each in decode.both_ready() if each != worker_id]
        self._spare_prefill(len(others))
        does_both = worker_id in decode and decode.duty_of(worker_id) is Duty.BOTH
        if does_both and not others and self._config.autoscale.least(Role.PREFILL.value) and not self.ready()[Role.PREFILL]:
            problem = f"{worker_id} is the only worker that computes prompts for others: add a prefill worker first"
            raise InvalidRequestError(problem, param="worker")

    def _hand_on_both(self) -> list[Action]:
        """Have a decode worker that is READY do both where one is to, and nobody who is READY computes prompts."""
        computes = self.ready().get(Role.PREFILL, 0) or self.both_ready
        return [] if computes else self._pools[Role.DECODE].hand_on_both()

    def why_not_alike(self) -> str | None:
        """What keeps workers of one role from doing the other's work; None if they can."""
        if len(self.roles) < len(Role):
            return "this cluster is colocated, so all of its workers do both"
        unlike = self._config.unlike
        return None if unlike is None else f"prefill.{unlike} and decode.{unlike} differ"

    def _from_standby(self, sizes: Mapping[Role, int]) -> list[Action]:
        """Workers on standby go to the roles that want more."""
        actions: list[Action] = []
        for role, workers in sizes.items():
            while self._pools[role].desired < workers and (worker_id := self._standby.spare()) is not None:
                actions += self._hand_over(worker_id, self._standby, self._pools[role])
        return actions

    def _to_standby(self, sizes: Mapping[Role, int]) -> list[Action]:
        """Workers that are no longer wanted go on standby, where some are missing there."""
        actions: list[Action] = []
        for role, workers in sizes.items():
            pool = self._pools[role]
            while pool.desired - pool.num_unready > workers and self._standby_lacks():
                worker_id = pool.spare()
                if worker_id is None:
                    break
                actions += self._hand_over(worker_id, pool, self._standby)
        return actions

    def _standby_lacks(self) -> bool:
        return self._standby.num_ready < self._config.autoscale.standby

    def _pool(self, role: Role, record: PoolRecord | None, revision: int) -> Pool:
        least = self._config.autoscale.least(role.value)
        return Pool(role, self._ids, record or NO_WORKERS, least=least, revision=revision)

    def _serving(self) -> tuple[Pool, ...]:
        """Those whose workers have a role, of both revisions."""
        return (*self._pools.values(), *self._new.values())

    def _find(self, worker_id: str) -> Pool | None:
        return next((pool for pool in (*self._serving(), self._standby) if worker_id in pool), None)

    def _pool_with(self, worker_id: str) -> Pool:
        pool = self._find(worker_id)
        if pool is None:
            raise InvalidRequestError(f"there is no worker {worker_id!r:.100}; `tandem status` lists them", param="worker")
        return pool


def _with(sizes: Mapping[Role, int], standby: int) -> dict[Role, int]:
    """Sizes with so many on standby among the decode workers."""
    return {role: workers + (standby if role is Role.DECODE else 0) for role, workers in sizes.items()}
