"""The decode worker as an actor: what it is built from."""

from __future__ import annotations

from decode_workers.rank import load_share
from decode_workers.worker import DecodeWorker
from engine.grammar import Grammars
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRankActor
from engine.ranks.gang import Gang
from engine.ranks.tensor_parallel import TensorParallel
from kv_transfer.choice import receiving_transports, sending_transports
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer


class DecodeActor(FirstRankActor):
    """One life of one decode worker."""

    role = Role.DECODE

    def load_share(self, ranks: TensorParallel) -> ModelRunner:
        return load_share(self._config, ranks)

    def worker(self, me: WorkerRef, runner: ModelRunner, grammars: Grammars, server: WireServer, gang: Gang) -> DecodeWorker:
        pool, wanted = runner.pool, self._config.transport
        receiving = receiving_transports(wanted, self._host, pool.data.device)
        sending = sending_transports(wanted, self._host, pool.data, pool.memory_fd)
        return DecodeWorker(me, self._secret, runner, grammars, server, receiving, sending, self._config, gang)
