"""The actor that one rank's process runs: finds out where it is, then hands everything to the worker's own classes.

A process is made without a role, so that a spare one can take over whichever worker dies next. Importing torch and the engine
takes longer than anything else at a start but the model; a spare has it behind it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from cluster.launcher import Started
from cluster.measured import measure, threads_on_node
from cluster.memory import computes_on_processor
from cluster.ray.actors import own_cpus
from cluster.ray.placement import pool_of
from configs.models import resolve_for
from configs.schema import ClusterConfig
from protocol.actor import WorkerActor
from protocol.messages.workers import Duty, Role
from telemetry.logging import setup_logging
from worker.visible_gpus import show_neighbours


@dataclass(frozen=True)
class Following:
    """Where a rank that is not the first listens and runs."""

    address: str
    pid: int


class _Running(Protocol):
    async def run(self) -> None: ...


class WorkerProcess:
    """The process of one rank for at most one life of its worker, wrapped by `ray.remote` in cluster.ray.launcher.

    Cheap to make.
    """

    def __init__(self) -> None:
        self._first: WorkerActor | None = None
        self._running: _Running | None = None
        self._serving: asyncio.Future[None] | None = None

    async def warm_up(self) -> None:
        """Import what any worker needs, so that a later start is quicker."""
        await asyncio.to_thread(_module)

    async def follow(
        self, role: Role, worker_id: str, rank: int, config: ClusterConfig, secret: bytes, threads: int
    ) -> Following:
        """Become this rank, which is not the first, and listen. The first rank makes it load the model."""
        show_neighbours()
        module = await asyncio.to_thread(_module)
        setup_logging(f"{worker_id}-rank-{rank}")
        threads = threads_on_node(config, role, threads, await asyncio.to_thread(own_cpus))
        follower = module.follower(role, config, secret, _node_address(), rank, threads)
        self._running = follower
        return Following(follower.address, os.getpid())

    async def start(
        self,
        role: Role,
        worker_id: str,
        epoch: int,
        config: ClusterConfig,
        secret: bytes,
        threads: int,
        others: Sequence[Following],
        *,
        own_logs: bool = True,
    ) -> Started:
        """Become this worker, whose other ranks are listening: load the model and listen. Raises TandemError.

        Without `own_logs` the process's logs are set up already, for several workers.
        """
        if own_logs:
            setup_logging(worker_id)
        show_neighbours()
        module = await asyncio.to_thread(_module)
        threads = threads_on_node(config, role, threads, await asyncio.to_thread(own_cpus))
        if computes_on_processor(config, pool_of(config, role)):
            facts = await asyncio.to_thread(lambda: resolve_for(config).facts)
            # The other half is for loading the model. Where `tandem serve` has measured, this only looks.
            await asyncio.to_thread(measure, config, facts, role, threads, config.limits.worker_start_s / 2)
        address = _node_address()
        addresses = [other.address for other in others]
        first = module.FirstRankOfWorker(role, worker_id, epoch, config, secret, address, threads, addresses)
        self._running = self._first = first
        ref = await first.start()
        return Started(ref, (os.getpid(), *(other.pid for other in others)), address)

    async def run(self) -> None:
        """Serve until `stop`; raises what ended the rank otherwise. The next controller asks again, and hears the same."""
        assert self._running is not None, "start comes first"
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._running.run())
        await asyncio.shield(self._serving)

    async def drain(self) -> None:
        """Take nothing new, and return once the worker has nothing left to do."""
        await self._started().drain()

    async def take_role(self, duty: Duty) -> None:
        """Do this work from now on."""
        await self._started().take_role(duty)

    async def stop(self) -> None:
        """Ask the worker to end. `run` returns when it has."""
        await self._started().stop()

    def _started(self) -> WorkerActor:
        assert self._first is not None, "only the first rank, and start comes first"
        return self._first


def _module() -> Any:
    # Imported where they run: the controller names this module's class and must not load torch for it.
    return importlib.import_module("cluster.worker_actor")


def _node_address() -> str:
    """The address by which other nodes reach this one; loopback in a local cluster."""
    return str(ray.util.get_node_ip_address())
