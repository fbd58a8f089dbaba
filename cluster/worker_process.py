"""The actor that one worker's process runs: finds out where it is, then hands everything to the role's own actor class.

A process is made without a role, so that a spare one can take over whichever worker dies next. Importing torch and the engine
takes longer than anything else at a start but the model; a spare has it behind it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import ray

from cluster.supervisor import Started
from configs.schema import ClusterConfig
from protocol.actor import WorkerActor
from protocol.messages import Role

ActorClass = Callable[[str, int, ClusterConfig, bytes, str, int], WorkerActor]


class WorkerProcess:
    """At most one life of one worker, wrapped by `ray.remote` in cluster.ray_launcher. Cheap to make."""

    def __init__(self) -> None:
        self._worker: WorkerActor | None = None

    async def warm_up(self) -> None:
        """Import what any worker needs."""
        for role in Role:
            await asyncio.to_thread(_actor_class, role)

    async def start(
        self, role: Role, worker_id: str, epoch: int, config: ClusterConfig, secret: bytes, threads: int
    ) -> Started:
        """Become this worker: load the model and listen. Raises TandemError."""
        actor_class = await asyncio.to_thread(_actor_class, role)
        address = _node_address()
        self._worker = actor_class(worker_id, epoch, config, secret, address, threads)
        return Started(await self._worker.start(), os.getpid(), address)

    async def run(self) -> None:
        """Serve until `stop`; raises what ended the worker otherwise."""
        await self._started().run()

    async def drain(self) -> None:
        """Returns once the worker has nothing left to do; it takes nothing new."""
        await self._started().drain()

    async def stop(self) -> None:
        await self._started().stop()

    def _started(self) -> WorkerActor:
        assert self._worker is not None, "start comes first"
        return self._worker


def _actor_class(role: Role) -> ActorClass:
    # Imported where they run: the controller names this module's class and must not load torch for it.
    if role is Role.PREFILL:
        from prefill_workers.actor import PrefillActor

        return PrefillActor
    from decode_workers.actor import DecodeActor

    return DecodeActor


def _node_address() -> str:
    """The address by which other nodes reach this one; loopback in a local cluster."""
    return str(ray.util.get_node_ip_address())
