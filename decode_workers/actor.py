"""The decode worker as an actor: what it is built from."""

from __future__ import annotations

from configs.schema import PoolConfig
from decode_workers.worker import DecodeWorker
from engine.ranks.first_rank import FirstRank, FirstRankActor
from kv_transfer.choice import at_configured_pace, receiving_transports, sending_transports
from protocol.messages import Role


class DecodeActor(FirstRankActor):
    """One life of one decode worker, seen from its first rank."""

    role = Role.DECODE

    @property
    def pool_config(self) -> PoolConfig:
        """The configuration of decode workers."""
        return self._config.decode

    def worker(self, rank: FirstRank) -> DecodeWorker:
        """Build a decode worker around its loaded first rank. Raises ConfigError if the wanted transport can't be had."""
        pool, wanted, encrypt = rank.runner.pool, self._config.transport, self._config.encrypt_kv
        receiving = receiving_transports(wanted, self._host, pool.data.device, encrypt=encrypt)
        sending = sending_transports(wanted, self._host, pool.data, pool.memory_fd, encrypt=encrypt)
        return DecodeWorker(rank, receiving, at_configured_pace(self._config, sending))
