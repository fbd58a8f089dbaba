"""The prefill worker as an actor: what it is built from. Its life is `protocol.actor`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from configs.schema import ClusterConfig
from engine.gang import Gang
from kv_transfer.choice import sending_transports
from prefill_workers.rank import load_share
from prefill_workers.worker import PrefillWorker
from protocol.actor import WorkerActor
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer
from telemetry.logging import setup_logging


class PrefillActor(WorkerActor):
    """One life of one prefill worker: its first rank. `others` are the addresses at which the other ranks listen, in order.

    `host` is the address to listen on, `threads` the cores to compute with.
    """

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

    async def build(self) -> PrefillWorker:
        setup_logging(self._worker_id)
        torch.set_num_threads(self._threads)
        config, limits = self._config, self._config.limits
        gang = await Gang.connect(
            self._others,
            self._secret,
            connect_s=limits.connect_s,
            lease_s=limits.lease_s,
            heartbeat_s=limits.heartbeat_s,
        )
        ranks = await gang.form(self._host, limits.worker_start_s)
        runner = await asyncio.to_thread(load_share, config, ranks)
        await gang.joined(runner.pool.num_blocks)
        server = WireServer(self._secret, self._host)
        me = WorkerRef(self._worker_id, self._epoch, Role.PREFILL, server.address, gang.size)
        transports = sending_transports(config.transport, self._host, runner.pool.data, runner.pool.memory_fd)
        return PrefillWorker(me, self._secret, runner, server, transports, config, gang)
