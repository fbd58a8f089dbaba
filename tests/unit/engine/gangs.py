"""All ranks of one tensor-parallel worker, driven like a single runner: as threads, which start at once, or as processes,
which can die. Both talk over gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, HashStore, Store

from configs.facts import ModelFacts
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner
from engine.ranks.tensor_parallel import TensorParallel, connect
from protocol.errors import TandemError

CPU, HOST = torch.device("cpu"), "127.0.0.1"
START_S = 60.0


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of all ranks at the same time, each on one core."""
    with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(START_S) for future in futures]


def connect_threads(size: int, deadline_s: float = START_S) -> list[TensorParallel]:
    store = HashStore()
    return in_threads(size, lambda rank: connect(store, rank, size, CPU, HOST, deadline_s))


class ThreadGang:
    """`execute` and `pool` as of a `ModelRunner`."""

    def __init__(self, facts: ModelFacts, size: int, **load: Any) -> None:
        ranks = connect_threads(size)
        # One after the other: torch's own loading is no faster in several threads.
        self.runners = [ModelRunner.load(facts, ranks=rank, **load) for rank in ranks]
        self.pool = self.runners[0].pool

    def execute(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        results: list[list[SampledToken | None]] = in_threads(
            len(self.runners), lambda rank: self.runners[rank].execute(chunks)
        )
        assert all(token is None for result in results[1:] for token in result), "only the first rank samples"
        return results[0]


@dataclass
class PoolSize:
    block_size: int
    num_blocks: int


class ProcessGang:
    """`execute` and `pool` as of a `ModelRunner`; each rank may also be asked alone."""

    def __init__(self, connections: list[Connection], processes: Sequence[BaseProcess]) -> None:
        self._connections = connections
        self._processes = processes
        # All are started before any has to connect in time.
        for rank in range(len(connections)):
            assert self.answer(rank, START_S) == "started"
        for connection in connections:
            connection.send("connect")
        self.pool, *_ = [self.answer(rank, START_S) for rank in range(len(connections))]

    def execute(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        for rank in range(len(self._connections)):
            self.begin(rank, chunks)
        results: list[list[SampledToken | None]] = [self.answer(rank, START_S) for rank in range(len(self._connections))]
        assert all(token is None for result in results[1:] for token in result), "only the first rank samples"
        return results[0]

    def begin(self, rank: int, chunks: Sequence[Chunk]) -> None:
        self._connections[rank].send(list(chunks))

    def answer(self, rank: int, deadline_s: float) -> Any:
        """What a rank's step made, or the error that it raised."""
        assert self._connections[rank].poll(deadline_s), f"rank {rank} hangs"
        return self._connections[rank].recv()

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


@contextmanager
def process_gang(
    facts: ModelFacts, size: int, rendezvous: Path, deadline_s: float = START_S, **load: Any
) -> Iterator[ProcessGang]:
    """Forked from a process that has only imported torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pydantic", "zmq"])
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_serve, args=(rank, size, rendezvous, deadline_s, facts, load, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        yield ProcessGang([ours for ours, _ in pipes], processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(
    rank: int, size: int, rendezvous: Path, deadline_s: float, facts: ModelFacts, load: dict[str, Any], asked: Connection
) -> None:
    torch.set_num_threads(1)
    asked.send("started")
    asked.recv()
    ranks = connect(FileStore(str(rendezvous), size), rank, size, CPU, HOST, deadline_s)
    runner = ModelRunner.load(facts, ranks=ranks, **load)
    asked.send(PoolSize(runner.pool.block_size, runner.pool.num_blocks))
    while True:
        chunks = asked.recv()
        try:
            asked.send(runner.execute(chunks))
        except TandemError as error:
            asked.send(error)


class AddressBook(Store):
    """What a worker's own rendezvous comes down to: every rank publishes one value, and waits for the others'."""

    def __init__(self, rank: int, published: dict[str, bytes], changed: threading.Condition, deadline_s: float) -> None:
        super().__init__()
        self.sets = 0
        self._rank = rank
        self._published = published
        self._changed = changed
        self._deadline_s = deadline_s

    def set(self, key: str, value: Any) -> None:
        assert key == f"0/{self._rank}", "a rank sets its own address and nothing else"
        self.sets += 1
        with self._changed:
            self._published[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._published[key]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._published for key in keys), self._deadline_s):
                raise TimeoutError("an address did not arrive")

    def has_extended_api(self) -> bool:
        return False
