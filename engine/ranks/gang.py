"""The first rank's side of a tensor-parallel worker: it alone plans; the others do as they are told.

    connect (sockets) ──► form (process group; every rank loads its share) ──► steps, one after the other ──► a rank is lost

A gang lives and dies as one. A rank whose connection is lost, or that does not answer in time, ends `run`, which ends the
worker; the others find the first rank gone and end too (`engine.ranks.follower`). What comes after is a new life with a new
epoch.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch

from engine.batch import Chunk
from engine.ranks.store import RelayStore
from engine.ranks.tensor_parallel import ALONE, TensorParallel, connect
from protocol.calls import CallClient, expect
from protocol.errors import WorkerLostError
from protocol.gang import GangJoin, GangJoined, RunStep, StepChunk, StepDone, StoreValue
from protocol.messages import Ping
from protocol.wire import WireClient

_Answer = TypeVar("_Answer")

STEP_LEASES = 6
"""A step, and each of its collectives, may take so many leases: ranks that share a processor wait for each other."""


class Gang:
    """Made by `connect`; `close` ends it. That of a worker of one rank has no others."""

    def __init__(self, others: Sequence[WireClient], *, lease_s: float, heartbeat_s: float) -> None:
        self._step_s = STEP_LEASES * lease_s
        self._heartbeat_s = heartbeat_s
        self._callers = [CallClient(client, self._told(rank)) for rank, client in enumerate(others, start=1)]
        self._reading = [asyncio.create_task(caller.run()) for caller in self._callers]
        self._living = asyncio.create_task(self._live()) if self._callers else None
        self._store: RelayStore | None = None
        self._steps = 0
        self._joining: asyncio.Future[list[Any]] | None = None

    @classmethod
    def alone(cls) -> Gang:
        """Of a worker of one rank."""
        return cls([], lease_s=1.0, heartbeat_s=1.0)

    @classmethod
    async def connect(
        cls, addresses: Sequence[str], secret: bytes, *, connect_s: float, lease_s: float, heartbeat_s: float
    ) -> Gang:
        """To the ranks behind the first one, in their order. Raises WorkerLostError."""
        clients: list[WireClient] = []
        try:
            for address in addresses:
                clients.append(await WireClient.connect(address, secret, connect_s))
        except BaseException:
            for client in clients:
                client.close()
            raise
        return cls(clients, lease_s=lease_s, heartbeat_s=heartbeat_s)

    @property
    def size(self) -> int:
        return 1 + len(self._callers)

    async def form(self, host: str, start_s: float) -> TensorParallel:
        """Connect the process group. The others go on to load their shares, which `joined` waits for.

        Raises WorkerLostError.
        """
        if self.size == 1:
            return ALONE
        loop = asyncio.get_running_loop()
        store = self._store = RelayStore(
            lambda key, value: loop.call_soon_threadsafe(self._relay, StoreValue(key, value), None), self._step_s
        )
        self._joining = asyncio.gather(*(self.ask(rank, GangJoin, GangJoined, start_s) for rank in range(1, self.size)))
        try:
            return await asyncio.to_thread(connect, store, 0, self.size, torch.device("cpu"), host, self._step_s)
        except BaseException:
            await self.close()
            raise

    async def joined(self, num_blocks: int) -> None:
        """Every rank is ready, with a pool of as many blocks. Raises what kept one from it."""
        for rank, answer in enumerate(await self._joining if self._joining else (), start=1):
            if answer.num_blocks != num_blocks:
                raise WorkerLostError(f"rank {rank} has {answer.num_blocks} KV blocks, the first one {num_blocks}")

    def begin(self, chunks: Sequence[Chunk]) -> list[Awaitable[StepDone]]:
        """Tell the others to execute these chunks; what is returned ends when each has, or raises what kept it."""
        self._steps += 1
        if not self._callers:
            return []
        step, plan = self._steps, tuple(_plan(chunk) for chunk in chunks)

        def build(call_id: int) -> RunStep:
            return RunStep(call_id, step, plan)

        ranks = range(1, self.size)
        return [asyncio.ensure_future(self.ask(rank, build, StepDone, self._step_s)) for rank in ranks]

    async def ask(self, rank: int, build: Callable[[int], Any], kind: type[_Answer], deadline_s: float) -> _Answer:
        """One rank's answer. Raises the error that it answers with, WorkerLostError, or UnavailableError after the deadline."""
        return expect(await self._callers[rank - 1].ask(build, deadline_s), kind)

    def asker(self, rank: int) -> Callable[[Callable[[int], Any], type[Any]], Awaitable[Any]]:
        """For the KV lanes that end at this rank."""
        return lambda build, kind: self.ask(rank, build, kind, self._step_s)

    async def run(self) -> None:
        """Until cancelled. Raises WorkerLostError when a rank is lost."""
        if self._living is None:
            await asyncio.Event().wait()
        else:
            await asyncio.shield(self._living)

    async def close(self) -> None:
        """The others find out, and end."""
        tasks = [task for task in (*self._reading, self._living) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *filter(None, [self._joining]), return_exceptions=True)

    async def _live(self) -> None:
        """Keep the others' leases until one of them is lost."""
        while True:
            for caller in self._callers:
                caller.send(Ping())
            lost, _ = await asyncio.wait(self._reading, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost:
                rank = 1 + self._reading.index(lost.pop())
                raise WorkerLostError(f"rank {rank} of {self.size} is lost")

    def _told(self, rank: int) -> Callable[[Any], None]:
        def on_message(message: Any) -> None:
            if isinstance(message, StoreValue) and self._store is not None:
                self._store.deliver(message.key, message.value)
                self._relay(message, rank)

        return on_message

    def _relay(self, message: StoreValue, source: int | None) -> None:
        """To every rank but the one that it comes from."""
        for rank, caller in enumerate(self._callers, start=1):
            if rank != source:
                caller.send(message)


def _plan(chunk: Chunk) -> StepChunk:
    samples, scores = chunk.sampling is not None, chunk.scores is not None
    return StepChunk(_packed(chunk.token_ids), chunk.start, _packed(chunk.block_table), samples, scores)


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()
