"""A worker's processes: its first rank as an actor, with the work of both roles, and the ranks that follow it.

Not imported by the controller and by commands: it brings torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.ray.placement import pool_of
from configs.schema import ClusterConfig
from decode_workers.worker import DecodeWorker
from engine.ranks.first_rank import FirstRank, FirstRankActor
from engine.ranks.follower import Follower
from kv_transfer.choice import at_configured_pace, receiving_transports, sending_transports
from prefill_workers.worker import PrefillWorker
from protocol.messages.workers import Role
from worker.core import NICENESS, WorkerCore
from worker.rank import follower_of
from worker.tiers import opened_tiers


class FirstRankOfWorker(FirstRankActor):
    """One life of one worker, seen from its first rank. The role that it begins with says how large its pool is."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        epoch: int,
        config: ClusterConfig,
        secret: bytes,
        host: str,
        threads: int,
        others: Sequence[str],
    ) -> None:
        """As `FirstRankActor`."""
        super().__init__(worker_id, epoch, config, pool_of(config, role), secret, host, threads, others)
        self._role = role

    async def worker(self, rank: FirstRank) -> WorkerCore:
        """Build the worker around its loaded first rank.

        Raises ConfigError if the wanted transport can't be had, or a folder of a tier can't be used.
        """
        pool, wanted, encrypt = rank.runner.pool, self._config.transport, self._config.encrypt_kv
        receiving = receiving_transports(wanted, self._host, pool.data.device, encrypt=encrypt)
        sending = sending_transports(wanted, self._host, pool.data, pool.memory_fd, encrypt=encrypt)
        tiers = await opened_tiers(rank)
        core = WorkerCore(rank, receiving, at_configured_pace(self._config, sending), NICENESS[self._role], tiers)
        PrefillWorker(core)
        DecodeWorker(core)
        return core


def follower(role: Role, config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank of a worker that is not the first. It listens on `host` and computes with `threads` cores."""
    return follower_of(config, pool_of(config, role), secret, host, rank, threads)
