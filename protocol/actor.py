"""The life of a worker actor.

    __init__ (cheap) ──► start (model loaded, socket listens) ──► run … ──► stop
                                                                   └── drain: no new work, returns when idle

The process of the worker's first rank (cluster.ray.worker_process), which is the Ray actor, makes one of these and awaits
`run`: its end is the worker's end. Nothing here knows Ray, so tests run the same classes in one process.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from protocol.messages.workers import Duty, WorkerRef


class Worker(Protocol):
    """The worker that an actor builds and runs (`worker.core`)."""

    @property
    def me(self) -> WorkerRef: ...

    async def run(self) -> None:
        """Serve until cancelled."""

    async def drain(self) -> None:
        """Take no new work; returns when idle."""

    async def take_role(self, duty: Duty) -> None:
        """Do this work from now on, and send back what has not begun of any other."""


class WorkerActor(ABC):
    """The actor of one life of one worker."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._stopped = asyncio.Event()

    @abstractmethod
    async def build(self) -> Worker:
        """Load the model and listen. Raises ConfigError when the model can't be loaded."""

    async def start(self) -> WorkerRef:
        self._worker = await self.build()
        return self._worker.me

    async def run(self) -> None:
        """Serve until `stop`; raises whatever else ended the worker."""
        serving = asyncio.create_task(self._started().run())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            serving.cancel()
            await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()

    async def drain(self) -> None:
        await self._started().drain()

    async def take_role(self, duty: Duty) -> None:
        await self._started().take_role(duty)

    async def stop(self) -> None:
        self._stopped.set()

    def _started(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker
