"""The first rank's side of a tensor-parallel worker: it alone plans; the others do as they are told.

    connect (sockets) ──► form (process group; every rank loads its share) ──► steps, one after the other ──► a rank is lost

A gang lives and dies as one. A rank whose connection is lost, or that does not answer in time, ends `run`, which ends the
worker; the others find the first rank gone and end too (`engine.ranks.follower`). What comes after is a new life with a new
epoch.

A rank that hangs keeps its connection. So the others answer each heartbeat, and one that is silent for as long as a step may
take is lost, whether or not there is a step.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch

from engine.arithmetic import whole_arithmetic
from engine.batch import Chunk
from engine.ranks.store import RelayStore
from engine.ranks.tensor_parallel import ALONE, TensorParallel, connect
from protocol.calls import CallClient, expect
from protocol.endpoint import Listening
from protocol.errors import WorkerLostError
from protocol.gang import STEP_LEASES, GangJoin, GangJoined, RunStep, StepChunk, StepDone, StoreValue
from protocol.messages.common import Ping
from protocol.wire import WireClient

_Answer = TypeVar("_Answer")


class Gang:
    """The other ranks of a worker, seen from its first one. Made by `connect` or `alone`, and ended by `close`."""

    def __init__(self, others: Sequence[WireClient], *, lease_s: float, heartbeat_s: float) -> None:
        self._step_s = STEP_LEASES * lease_s
        self._silent_s = self._step_s
        """How long a rank may say nothing: ranks that share a processor wait for each other."""
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._heard_at = [float("-inf")] * len(others)
        self._callers = [CallClient(client, self._told(rank)) for rank, client in enumerate(others, start=1)]
        self._reading = [asyncio.create_task(caller.run()) for caller in self._callers]
        self._living = asyncio.create_task(self._live()) if self._callers else None
        self._store: RelayStore | None = None
        self._steps = 0
        self._joining: asyncio.Future[list[Any]] | None = None
        self.gpus: tuple[str, ...] = ()
        """UUIDs of the other ranks' GPUs, once they have joined; empty ones of those on a processor."""

    @classmethod
    def alone(cls) -> Gang:
        """The gang of a worker that has one rank."""
        return cls([], lease_s=1.0, heartbeat_s=1.0)

    @classmethod
    async def connect(
        cls, addresses: Sequence[str], secret: bytes, *, connect_s: float, lease_s: float, heartbeat_s: float
    ) -> Gang:
        """Connect to the ranks behind the first one; `addresses` are in the order of the ranks. Times are in seconds.

        Raises WorkerLostError if one can't be reached within `connect_s`.
        """
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
        """Number of ranks, the first one included."""
        return 1 + len(self._callers)

    async def form(self, host: str, start_s: float, device: torch.device) -> TensorParallel:
        """Connect the process group, and return the first rank's place in it. The others then load their shares; `joined`
        waits for them.

        All ranks compute on devices of the kind of `device`. `start_s` is the time in seconds that they have for both. Raises
        WorkerLostError.
        """
        if self.size == 1:
            return ALONE
        loop = asyncio.get_running_loop()
        store = self._store = RelayStore(
            lambda key, value: loop.call_soon_threadsafe(self._relay, StoreValue(key, value), None), self._step_s
        )
        self._joining = asyncio.gather(*(self.ask(rank, GangJoin, GangJoined, start_s) for rank in range(1, self.size)))
        try:
            return await self.beside(asyncio.to_thread(connect, store, 0, self.size, device, host, self._step_s))
        except BaseException:
            await self.close()
            raise

    async def beside(self, work: Awaitable[_Answer]) -> _Answer:
        """Return what this rank's part of joining returns. Raises what keeps another rank from joining, as soon as it is known.

        On a GPU the part of a rank that waits for a lost one ends only at NCCL's deadline. It goes on in its thread then.
        """
        own = asyncio.ensure_future(work)
        others = {each for each in (self._joining, self._living) if each is not None}
        try:
            while not own.done():
                await asyncio.wait({own, *others}, return_when=asyncio.FIRST_COMPLETED)
                for each in [each for each in others if each.done()]:
                    each.result()  # raises, if it has failed
                    others.remove(each)
            return own.result()
        finally:
            own.add_done_callback(_observe)

    async def joined(self, num_blocks: int, arithmetic: str) -> str:
        """Wait until every other rank has loaded its share. Returns the name of the whole worker's arithmetic, where
        `arithmetic` is that of the first rank's.

        Raises WorkerLostError if a rank's pool has other than `num_blocks` blocks, and whatever error kept one from loading.
        """
        answers = await self._joining if self._joining else ()
        for rank, answer in enumerate(answers, start=1):
            if answer.num_blocks != num_blocks:
                raise WorkerLostError(f"rank {rank} has {answer.num_blocks} KV blocks, the first one {num_blocks}")
        self.gpus = tuple(answer.gpu for answer in answers)
        return whole_arithmetic([arithmetic, *(answer.arithmetic for answer in answers)])

    def begin(self, chunks: Sequence[Chunk], *, tells_layers: bool, niceness: int) -> list[Awaitable[StepDone]]:
        """Tell the other ranks to execute these chunks. Each returned awaitable ends when its rank has done so, or raises what
        kept it. `tells_layers`: the first rank tells of its layers as they are computed, and the others do so too. They compute
        with the `niceness` of the first one.
        """
        self._steps += 1
        if not self._callers:
            return []
        step, plan = self._steps, tuple(_plan(chunk) for chunk in chunks)

        def build(call_id: int) -> RunStep:
            return RunStep(call_id, step, plan, tells_layers, niceness)

        ranks = range(1, self.size)
        return [asyncio.ensure_future(self.ask(rank, build, StepDone, self._step_s)) for rank in ranks]

    async def ask(self, rank: int, build: Callable[[int], Any], kind: type[_Answer], deadline_s: float | None) -> _Answer:
        """Ask one rank the question that `build` makes from a call id, and return its answer of type `kind`.

        Raises the error that the rank answers with, WorkerLostError if it is lost, or UnavailableError after `deadline_s`
        seconds. Without a deadline the rank is waited for until it is lost.
        """
        return expect(await self._callers[rank - 1].ask(build, deadline_s), kind)

    def askers(self) -> list[Callable[..., Awaitable[Any]]]:
        """Return a function for each rank but the first that asks it a question, for the KV lanes that end there
        (`kv_transfer.remote_lanes.Ask`).

        The deadline is that of a step, or none where the rank has its own.
        """
        return [self._asker(rank) for rank in range(1, self.size)]

    async def run(self) -> None:
        """Keep the other ranks' leases until cancelled. Raises WorkerLostError when a rank is lost.

        Either way it leaves the gang closed to questions, and open ones fail: what waits for a rank that hangs can end.
        """
        try:
            await (asyncio.Event().wait() if self._living is None else asyncio.shield(self._living))
        finally:
            for caller in self._callers:
                caller.close()

    async def close(self) -> None:
        """Close the connections. The other ranks find their first one gone, and end."""
        tasks = [task for task in (*self._reading, self._living) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *filter(None, [self._joining]), return_exceptions=True)

    async def _live(self) -> None:
        """Keep the others' leases until one of them is lost."""
        listening = Listening(self._lease_s)
        while True:
            for caller in self._callers:
                caller.send(Ping())
            lost, _ = await asyncio.wait(self._reading, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if lost:
                rank = 1 + self._reading.index(lost.pop())
                raise WorkerLostError(f"rank {rank} of {self.size} is lost")
            listening.look()
            for rank, heard_at in enumerate(self._heard_at, start=1):
                if listening.silent_s(heard_at) >= self._silent_s:
                    raise WorkerLostError(f"rank {rank} of {self.size} was silent for {self._silent_s:g} s")

    def _asker(self, rank: int) -> Callable[..., Awaitable[Any]]:
        async def ask(build: Callable[[int], Any], kind: type[_Answer], *, until_lost: bool = False) -> _Answer:
            return await self.ask(rank, build, kind, None if until_lost else self._step_s)

        return ask

    def _told(self, rank: int) -> Callable[[Any], None]:
        def on_message(message: Any) -> None:
            self._heard_at[rank - 1] = time.monotonic()
            if isinstance(message, StoreValue) and self._store is not None:
                self._store.deliver(message.key, message.value)
                self._relay(message, rank)

        return on_message

    def _relay(self, message: StoreValue, source: int | None) -> None:
        """To every rank but the one that it comes from."""
        for rank, caller in enumerate(self._callers, start=1):
            if rank != source:
                caller.send(message)


def _observe(work: asyncio.Future[Any]) -> None:
    """Mark a failure as seen that nobody waits for any more."""
    if not work.cancelled():
        work.exception()


def _plan(chunk: Chunk) -> StepChunk:
    return StepChunk(
        token_ids=_packed(chunk.token_ids),
        start=chunk.start,
        block_table=b"" if chunk.continues else _packed(chunk.block_table),
        samples=chunk.sampling is not None,
        scores=chunk.scores is not None,
        continues=chunk.continues,
    )


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()
