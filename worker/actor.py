"""The first rank of a worker of either role as an actor: the core is built around the loaded rank, and the role on the core."""

from __future__ import annotations

from abc import abstractmethod

from engine.ranks.first_rank import FirstRank, FirstRankActor
from kv_transfer.choice import at_configured_pace, receiving_transports, sending_transports
from protocol.actor import Worker
from worker.core import WorkerCore


class RoleActor(FirstRankActor):
    """One life of one worker, seen from its first rank."""

    niceness = 0
    """Of the thread that computes."""

    @abstractmethod
    def role_on(self, core: WorkerCore) -> Worker:
        """Build the role's worker on its core."""

    def worker(self, rank: FirstRank) -> Worker:
        """Build the worker around its loaded first rank. Raises ConfigError if the wanted transport can't be had."""
        pool, wanted, encrypt = rank.runner.pool, self._config.transport, self._config.encrypt_kv
        receiving = receiving_transports(wanted, self._host, pool.data.device, encrypt=encrypt)
        sending = sending_transports(wanted, self._host, pool.data, pool.memory_fd, encrypt=encrypt)
        return self.role_on(WorkerCore(rank, receiving, at_configured_pace(self._config, sending), self.niceness))
