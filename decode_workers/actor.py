"""The decode worker's processes: its first rank as an actor, and the others."""

from __future__ import annotations

from configs.schema import ClusterConfig, PoolConfig
from decode_workers.worker import DecodeWorker
from engine.ranks.follower import Follower
from protocol.messages import Role
from worker.actor import RoleActor
from worker.core import WorkerCore
from worker.rank import follower_of


class DecodeActor(RoleActor):
    """One life of one decode worker, seen from its first rank."""

    role = Role.DECODE

    @property
    def pool_config(self) -> PoolConfig:
        """The configuration of decode workers."""
        return self._config.decode

    def role_on(self, core: WorkerCore) -> DecodeWorker:
        """Build the decode worker on its core."""
        return DecodeWorker(core)


def decode_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank of a decode worker that is not the first. It listens on `host` and computes with `threads` cores."""
    return follower_of(config, config.decode, secret, host, rank, threads, sends_layers=False)
