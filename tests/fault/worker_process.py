"""Workers in processes of their own, which a test can stop and kill."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, TransportName
from decode_workers.worker import DecodeWorker
from engine.model_runner import ModelRunner
from kv_transfer.choice import receiving_transports, sending_transports
from prefill_workers.worker import PrefillWorker
from protocol.messages.workers import Role, WorkerRef
from protocol.wire import WireServer
from tests.fault.two_workers import SECRET, first_rank
from worker.core import WorkerCore

HOST = "127.0.0.1"


@dataclass
class WorkerProcess:
    ref: WorkerRef
    process: BaseProcess

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def make_worker(
    role: Role, worker_id: str, facts: ModelFacts, config: ClusterConfig, transport: TransportName
) -> PrefillWorker | DecodeWorker:
    """On the running loop."""
    pool = config.prefill if role is Role.PREFILL else config.decode
    runner = ModelRunner.load(
        facts,
        dtype="float32",
        block_size=config.block_size,
        num_kv_tokens=pool.kv_cache_tokens,
        shared_kv=True,
    )
    server = WireServer(SECRET, HOST)
    me = WorkerRef(worker_id, 1, server.address)
    first = first_rank(me, config, server, runner)
    sending = sending_transports(transport, HOST, runner.pool.data, runner.pool.memory_fd)
    receiving = receiving_transports(transport, HOST, runner.pool.data.device)
    worker = PrefillWorker if role is Role.PREFILL else DecodeWorker
    return worker(WorkerCore(first, receiving, sending))


@contextmanager
def worker_process(
    role: Role, worker_id: str, facts: ModelFacts, config: ClusterConfig, transport: TransportName
) -> Iterator[WorkerProcess]:
    """Forked from a process that has only imported torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pydantic", "zmq"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(role, worker_id, facts, config, transport, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the worker did not start"
        yield WorkerProcess(ours.recv(), process)
    finally:
        process.kill()
        process.join()


def _serve(
    role: Role, worker_id: str, facts: ModelFacts, config: ClusterConfig, transport: TransportName, told: Connection
) -> None:
    async def serve() -> None:
        worker = make_worker(role, worker_id, facts, config, transport)
        told.send(worker.me)
        await worker.core.run()

    torch.set_num_threads(1)
    asyncio.run(serve())
