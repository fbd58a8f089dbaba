"""The prefill worker as an actor: what it is built from. Its life is `protocol.actor`'s."""

from __future__ import annotations

import asyncio

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from engine.model_runner import ModelRunner
from kv_transfer.choice import sending_transports
from prefill_workers.worker import PrefillWorker
from protocol.actor import WorkerActor
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer
from telemetry.logging import setup_logging


class PrefillActor(WorkerActor):
    """One life of one prefill worker. `host` is the address to listen on, `threads` the cores to compute with."""

    def __init__(self, worker_id: str, epoch: int, config: ClusterConfig, secret: bytes, host: str, threads: int) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._epoch = epoch
        self._config = config
        self._secret = secret
        self._host = host
        self._threads = threads

    async def build(self) -> PrefillWorker:
        setup_logging(self._worker_id)
        torch.set_num_threads(self._threads)
        runner = await asyncio.to_thread(self._load)
        transports = sending_transports(self._config.transport, self._host, runner.pool.memory_fd)
        server = WireServer(self._secret, self._host)
        me = WorkerRef(self._worker_id, self._epoch, Role.PREFILL, server.address)
        return PrefillWorker(me, self._secret, runner, server, transports, self._config)

    def _load(self) -> ModelRunner:
        config = self._config
        return ModelRunner.load(
            resolve_for(config).facts,
            dtype=config.dtype,
            quantization=config.quantization,
            deterministic=config.deterministic,
            block_size=config.block_size,
            num_kv_tokens=config.prefill.kv_cache_tokens,
            shared_kv=config.transport != "gloo",
        )
