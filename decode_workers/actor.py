"""The decode worker as an actor: what it is built from. Its life is `protocol.actor`'s."""

from __future__ import annotations

import asyncio

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from decode_workers.worker import DecodeWorker
from engine.model_runner import ModelRunner
from kv_transfer.choice import receiving_transports
from protocol.actor import WorkerActor
from protocol.messages import Role, WorkerRef
from protocol.wire import WireServer
from telemetry.logging import setup_logging


class DecodeActor(WorkerActor):
    """One life of one decode worker. `host` is the address to listen on, `threads` the cores to compute with."""

    def __init__(self, worker_id: str, epoch: int, config: ClusterConfig, secret: bytes, host: str, threads: int) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._epoch = epoch
        self._config = config
        self._secret = secret
        self._host = host
        self._threads = threads

    async def build(self) -> DecodeWorker:
        setup_logging(self._worker_id)
        torch.set_num_threads(self._threads)
        runner = await asyncio.to_thread(self._load)
        transports = receiving_transports(self._config.transport, self._host)
        server = WireServer(self._secret, self._host)
        me = WorkerRef(self._worker_id, self._epoch, Role.DECODE, server.address)
        return DecodeWorker(me, runner, server, transports, self._config)

    def _load(self) -> ModelRunner:
        config = self._config
        return ModelRunner.load(
            resolve_for(config).facts,
            dtype=config.dtype,
            quantization=config.quantization,
            deterministic=config.deterministic,
            block_size=config.block_size,
            num_kv_tokens=config.decode.kv_cache_tokens,
        )
