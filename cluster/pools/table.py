"""The workers of a cluster in their pools: who they are, how many are wanted, and by which configuration they run.

Each role has a pool, and workers on standby (`autoscale.standby`) have one of their own. While a new configuration is rolled
out (`cluster.rollout`), each role has a second pool, of the workers that have it: the new revision. In the end one of the two
revisions is empty, and forgotten. What workers are to do is decided in `cluster.pools.pools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cluster.pools.actions import Action
from cluster.pools.members import NO_WORKERS, PoolRecord, WorkerIds
from cluster.pools.pool import Pool
from cluster.pools.revisions import ONE_REVISION, Numbers, RevisionsRecord, numbers_of
from configs.schema import ClusterConfig
from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty, Role


class PoolTable:
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

    @property
    def any_leaving(self) -> bool:
        """Whether workers leave their nodes, or are missing because some have."""
        return any(pool.any_leaving for pool in (*self._serving(), self._standby))

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

    def why_not_alike(self) -> str | None:
        """What keeps workers of one role from doing the other's work; None if they can."""
        if len(self.roles) < len(Role):
            return "this cluster is colocated, so all of its workers do both"
        unlike = self._config.unlike
        return None if unlike is None else f"prefill.{unlike} and decode.{unlike} differ"

    def with_standby(self, sizes: Mapping[Role, int]) -> dict[Role, int]:
        """Sizes as they count for the room that they take."""
        return add_standby(sizes, self._config.autoscale.standby)

    def _placed(self) -> dict[Role, int]:
        """How many workers there are on nodes that stay, those that drain there among them."""
        sizes = {role: sum(each.num_placed for each in self._serving() if each.role is role) for role in self.roles}
        return add_standby(sizes, self._standby.num_placed)

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


def add_standby(sizes: Mapping[Role, int], standby: int) -> dict[Role, int]:
    """Return sizes with so many workers on standby among those of decode, which they take the room of."""
    return {role: workers + (standby if role is Role.DECODE else 0) for role, workers in sizes.items()}
