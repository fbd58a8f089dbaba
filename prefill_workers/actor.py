"""The prefill worker's processes: its first rank as an actor, and the others."""

from __future__ import annotations

from configs.schema import ClusterConfig, PoolConfig
from engine.niceness import PREFILL_NICENESS
from engine.ranks.follower import Follower
from prefill_workers.worker import PrefillWorker
from protocol.messages import Role
from worker.actor import RoleActor
from worker.core import WorkerCore
from worker.rank import follower_of


class PrefillActor(RoleActor):
    """One life of one prefill worker, seen from its first rank."""

    role = Role.PREFILL
    niceness = PREFILL_NICENESS

    @property
    def pool_config(self) -> PoolConfig:
        """The configuration of prefill workers."""
        return self._config.prefill

    def role_on(self, core: WorkerCore) -> PrefillWorker:
        """Build the prefill worker on its core."""
        return PrefillWorker(core)


def prefill_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank of a prefill worker that is not the first. It listens on `host` and computes with `threads` cores."""
    return follower_of(config, config.prefill, secret, host, rank, threads, sends_layers=True)
