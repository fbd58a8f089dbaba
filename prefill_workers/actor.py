"""The prefill worker as an actor: what it is built from."""

from __future__ import annotations

from configs.schema import PoolConfig
from engine.ranks.first_rank import FirstRank, FirstRankActor
from kv_transfer.choice import at_configured_pace, receiving_transports, sending_transports
from prefill_workers.worker import PrefillWorker
from protocol.messages import Role


class PrefillActor(FirstRankActor):
    """One life of one prefill worker, seen from its first rank."""

    role = Role.PREFILL

    @property
    def pool_config(self) -> PoolConfig:
        """The configuration of prefill workers."""
        return self._config.prefill

    def worker(self, rank: FirstRank) -> PrefillWorker:
        """Build a prefill worker around its loaded first rank. Raises ConfigError if the wanted transport can't be had."""
        pool, wanted, encrypt = rank.runner.pool, self._config.transport, self._config.encrypt_kv
        receiving = receiving_transports(wanted, self._host, pool.data.device, encrypt=encrypt)
        sending = sending_transports(wanted, self._host, pool.data, pool.memory_fd, encrypt=encrypt)
        return PrefillWorker(rank, receiving, at_configured_pace(self._config, sending))
