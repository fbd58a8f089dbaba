"""The actor that several paced workers share: one process, one event loop, and a `WorkerProcess` for each life.

    start ──► listening ──run──► ... ──► end: refused from then on, and over when nothing of it runs

A paced worker waits more than it works, so that a process for each would cost memory and nothing else. The controller sees
workers as ever. Those of one host die together, and each begins its next life at another. Ray may let a call overtake another
one: a life that was to end before it began never begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass

from cluster.launcher import Started
from cluster.ray.worker_process import WorkerProcess
from configs.schema import ClusterConfig
from protocol.errors import WorkerLostError
from protocol.messages.workers import Duty, Role, WorkerLife
from telemetry.logging import name_component, setup_logging

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Seconds that a worker has to close what it holds. What is not closed then is closed later, beside the others' work."""


@dataclass
class _Living:
    process: WorkerProcess
    starting: asyncio.Task[Started]
    ending: asyncio.Task[None] | None = None


class PacedHost:
    """The process of some paced workers, wrapped by `ray.remote` in cluster.ray.paced.launcher."""

    def __init__(self) -> None:
        setup_logging("paced-host")
        self._lives: dict[WorkerLife, _Living] = {}
        self._ended: dict[str, int] = {}
        """The last epoch that was ended, by worker."""

    async def start(self, role: Role, life: WorkerLife, config: ClusterConfig, secret: bytes) -> Started:
        """Start this life, which listens when this returns. Raises TandemError."""
        if life.epoch <= self._ended.get(life.worker_id, 0):
            raise WorkerLostError(f"{life.worker_id} was ended before it began")
        name_component(life.worker_id)
        process = WorkerProcess()
        starting = asyncio.ensure_future(process.start(role, *life, config, secret, 1, (), own_logs=False))
        self._lives[life] = _Living(process, starting)
        return await asyncio.shield(starting)

    async def run(self, life: WorkerLife) -> None:
        """Serve until `stop`; raises what ended the worker otherwise."""
        name_component(life.worker_id)
        await self._living(life).process.run()

    async def drain(self, life: WorkerLife) -> None:
        """Take nothing new, and return once the worker has nothing left to do."""
        await self._living(life).process.drain()

    async def take_role(self, life: WorkerLife, duty: Duty) -> None:
        """Do this work from now on."""
        await self._living(life).process.take_role(duty)

    async def stop(self, life: WorkerLife) -> None:
        """Ask the worker to end. `run` returns when it has."""
        await self._living(life).process.stop()

    async def end(self, life: WorkerLife) -> None:
        """End this life, whatever it does. Returns when it takes no part in anything any more. Idempotent."""
        self._ended[life.worker_id] = max(life.epoch, self._ended.get(life.worker_id, 0))
        living = self._lives.get(life)
        if living is not None:
            living.ending = living.ending or asyncio.ensure_future(self._end(life, living))
            await asyncio.shield(living.ending)

    async def keep(self, lives: Collection[WorkerLife]) -> None:
        """End all lives but these."""
        await asyncio.gather(*(self.end(life) for life in list(self._lives) if life not in lives))

    async def _end(self, life: WorkerLife, living: _Living) -> None:
        living.starting.cancel()
        await asyncio.wait([living.starting])
        if not living.starting.cancelled() and living.starting.exception() is None:
            await living.process.stop()
            # How it ended was told to whoever awaits `run`.
            closing = asyncio.gather(living.process.run(), return_exceptions=True)
            await asyncio.wait([closing], timeout=_CLOSE_S)
            if not closing.done():
                log.warning("%s epoch %d still closes what it holds", *life)
        del self._lives[life]

    def _living(self, life: WorkerLife) -> _Living:
        if life not in self._lives:
            raise WorkerLostError(f"{life.worker_id} has ended")
        return self._lives[life]
