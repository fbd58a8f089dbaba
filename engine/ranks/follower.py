"""A rank of a tensor-parallel worker that is not the first: it joins, executes what it is told, and goes with the first one.

    listen ──► joined (group connected, share loaded) ──► steps, in order … ──► the first rank is silent or gone: over

It decides nothing and samples nothing. Questions of other kinds (KV lanes) go to the handlers that its model's loading has
brought along.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import Chunk
from engine.gpu_checks import uuid_of
from engine.niceness import NiceThread
from engine.ranks.store import RelayStore
from engine.ranks.tensor_parallel import TensorParallel, connect
from engine.runner import Runner
from engine.scoring import PromptScores
from protocol.endpoint import Listening
from protocol.errors import TandemError, WorkerLostError
from protocol.gang import STEP_LEASES, GangJoin, GangJoined, RunStep, StepChunk, StepDone, StoreValue
from protocol.messages.common import Failed, Ping
from protocol.sampling import SamplingParams
from protocol.wire import PeerGone, WireServer

log = logging.getLogger(__name__)

_SOMEHOW = SamplingParams(seed=0, max_tokens=1)
"""Tells the model that a chunk's logits are wanted. How they are sampled is the first rank's business."""
_SCORED = PromptScores((), 0)
"""Tells the model that the logits of all tokens of a chunk are wanted. The first rank scores them."""


@dataclass(frozen=True)
class Share:
    """A rank's loaded model, with callbacks that follow its steps and handlers for the questions of its KV lanes."""

    runner: Runner
    handlers: Mapping[type[Any], Callable[[Any], Awaitable[Any]]]
    """For each type of question, the function that answers it or raises a TandemError."""
    begin_step: Callable[[], int]
    """Called before each step. Returns its number; steps are numbered from 1."""
    layer_done: Callable[[int], None]
    """Called with each layer's index as soon as its K and V are in the pool."""
    finish_step: Callable[[], None]
    """Called after each step, also after one that failed."""
    close: Callable[[], Awaitable[None]]


class Follower:
    """One rank behind the first. `load` runs in the engine's thread: it loads the share once the process group is connected."""

    def __init__(
        self,
        server: WireServer,
        rank: int,
        size: int,
        host: str,
        load: Callable[[TensorParallel], Share],
        lease_s: float,
        device: torch.device,
    ) -> None:
        """`device` is of the kind that the ranks compute on."""
        self.address = server.address
        self._server = server
        self._rank = rank
        self._size = size
        self._host = host
        self._load = load
        self._lease_s = lease_s
        self._device = device
        self._engine = NiceThread()
        self._first: bytes | None = None
        """Wire identity of the first rank."""
        self._store: RelayStore | None = None
        self._share: Share | None = None
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve until cancelled. Raises WorkerLostError when the first rank is gone, and any error of a handler that is no
        answer.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch())
                while True:
                    self._arrived(*await self._server.receive())
        finally:
            if self._share is not None:
                await self._share.close()
            self._engine.close()
            self._server.close()

    async def _watch(self) -> None:
        """Until the first rank, once it has come, is silent for a lease."""
        listening = Listening(self._lease_s)
        while self._first is None or listening.silent_s(self._server.heard_at(self._first)) < self._lease_s:
            await asyncio.sleep(self._lease_s / 10)
            listening.look()
        raise WorkerLostError(f"rank {self._rank} of {self._size}: the first rank is silent")

    def _arrived(self, peer: bytes, message: Any) -> None:
        match message:
            case GangJoin() if self._first is None:
                self._first = peer
                self._answer(message.call_id, self._join(message, self._new_store()))
            case Ping():  # the server keeps account of who is silent
                if peer == self._first:
                    self._send(Ping())
            case _ if peer != self._first:
                log.warning("dropped a %s: not from the first rank", type(message).__name__)
            case StoreValue():
                if self._store is not None:
                    self._store.deliver(message.key, message.value)
            case RunStep():
                self._answer(message.call_id, self._execute(message))
            case _:
                handler = None if self._share is None else self._share.handlers.get(type(message))
                if handler is not None:
                    self._answer(message.call_id, handler(message))

    def _new_store(self) -> RelayStore:
        """Made as soon as the first rank has come: the other ranks' values may be the next messages."""
        loop = asyncio.get_running_loop()
        self._store = RelayStore(
            lambda key, value: loop.call_soon_threadsafe(self._send, StoreValue(key, value)), STEP_LEASES * self._lease_s
        )
        return self._store

    def _answer(self, call_id: int, work: Awaitable[Any]) -> None:
        async def answered() -> None:
            try:
                answer = await work
            except TandemError as error:
                answer = Failed.from_error(call_id, error)
            self._send(answer)

        self._tasks.create_task(answered())

    def _send(self, message: Any) -> None:
        assert self._first is not None, "there is nobody to tell"
        try:
            self._server.send(self._first, message)
        except PeerGone:
            log.info("the first rank is gone")

    async def _join(self, message: GangJoin, store: RelayStore) -> GangJoined:
        deadline_s = STEP_LEASES * self._lease_s

        def join() -> Share:
            return self._load(connect(store, self._rank, self._size, self._device, self._host, deadline_s))

        share = self._share = await self._engine.run(join)
        pool = share.runner.pool
        return GangJoined(message.call_id, pool.num_blocks, share.runner.arithmetic, uuid_of(pool.data.device))

    async def _execute(self, message: RunStep) -> StepDone:
        share = self._share
        if share is None:
            raise WorkerLostError(f"rank {self._rank} of {self._size} has no model yet")
        self._engine.renice(message.niceness)
        await self._engine.run(_run_step, share, message)
        return StepDone(message.call_id)


def _run_step(share: Share, message: RunStep) -> None:
    step = share.begin_step()
    try:
        if step != message.step:
            raise WorkerLostError(f"step {message.step} came where {step} was due")
        on_layer = share.layer_done if message.tells_layers else None
        share.runner.execute([_chunk(plan) for plan in message.chunks], on_layer)
    finally:
        share.finish_step()


def _chunk(plan: StepChunk) -> Chunk:
    sampling = _SOMEHOW if plan.samples else None
    scores = _SCORED if plan.scores else None
    table = array("i", plan.block_table)
    token_ids = array("i", plan.token_ids)
    return Chunk(token_ids, plan.start, table, sampling, num_generated=0, scores=scores, continues=plan.continues)
