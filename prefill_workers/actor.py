"""The prefill worker as an actor: what it is built from."""

from __future__ import annotations

from engine.grammar import Grammars
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRankActor
from engine.ranks.gang import Gang
from engine.ranks.tensor_parallel import TensorParallel
from kv_transfer.choice import sending_transports
from prefill_workers.rank import load_share
from prefill_workers.worker import PrefillWorker
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer


class PrefillActor(FirstRankActor):
    """One life of one prefill worker."""

    role = Role.PREFILL

    def load_share(self, ranks: TensorParallel) -> ModelRunner:
        return load_share(self._config, ranks)

    def worker(self, me: WorkerRef, runner: ModelRunner, grammars: Grammars, server: WireServer, gang: Gang) -> PrefillWorker:
        transports = sending_transports(self._config.transport, self._host, runner.pool.data, runner.pool.memory_fd)
        return PrefillWorker(me, self._secret, runner, grammars, server, transports, self._config, gang)
