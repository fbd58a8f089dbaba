"""The first rank of a worker as an actor: the others joined, its share loaded. Its life is `protocol.actor`'s.

connect to the others ──► form the group ──► load this rank's share ──► every rank has joined ──► the role's own worker
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from engine.grammar import Grammars
from engine.model_runner import ModelRunner
from engine.ranks.gang import Gang
from engine.ranks.tensor_parallel import TensorParallel
from protocol.actor import Worker, WorkerActor
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer
from telemetry.logging import setup_logging


class FirstRankActor(WorkerActor):
    """One life of one worker. `others` are the addresses at which its other ranks listen, in order.

    `host` is the address to listen on, `threads` the cores to compute with.
    """

    role: Role

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        config: ClusterConfig,
        secret: bytes,
        host: str,
        threads: int,
        others: Sequence[str],
    ) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._epoch = epoch
        self._config = config
        self._secret = secret
        self._host = host
        self._threads = threads
        self._others = others

    @abstractmethod
    def load_share(self, ranks: TensorParallel) -> ModelRunner:
        """Raises ConfigError when the model can't be loaded. Runs in a thread."""

    @abstractmethod
    def worker(self, me: WorkerRef, runner: ModelRunner, grammars: Grammars, server: WireServer, gang: Gang) -> Worker:
        """The worker that all this is for."""

    async def build(self) -> Worker:
        setup_logging(self._worker_id)
        torch.set_num_threads(self._threads)
        limits = self._config.limits
        gang = await Gang.connect(
            self._others,
            self._secret,
            connect_s=limits.connect_s,
            lease_s=limits.lease_s,
            heartbeat_s=limits.heartbeat_s,
        )
        ranks = await gang.form(self._host, limits.worker_start_s)
        runner = await asyncio.to_thread(self.load_share, ranks)
        await gang.joined(runner.pool.num_blocks)
        server = WireServer(self._secret, self._host)
        me = WorkerRef(self._worker_id, self._epoch, self.role, server.address, gang.size)
        model = await asyncio.to_thread(resolve_for, self._config)
        return self.worker(me, runner, Grammars(model), server, gang)
