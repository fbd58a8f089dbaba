"""Hears of nodes that will go, and has the supervisor empty them in time.

    every second: which nodes does Ray drain? ─► whose lives are there? ─► Supervisor.heed ─► replaced, drained, ended

That Ray drains a node is the one truth about it, whoever has said so: `tandem leave`, `ray start` when it gets SIGTERM, or
Ray's autoscaler. A controller that is started anew asks again, and goes on. The head node can't be left: routers and
controller are there, so what is said of it changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from cluster.nodes.gcs import DrainedNode
from cluster.nodes.leaving import Leaving
from cluster.ray.placement import Room
from cluster.supervision.supervisor import Supervisor
from protocol.errors import UnavailableError
from protocol.messages.workers import WorkerLife

log = logging.getLogger(__name__)

LOOK_S = 1.0
_ANSWER_S = 10.0
"""Deadline for everything that is asked of Ray in one look."""


class Places(Protocol):
    """What is asked of a launcher about nodes."""

    async def leave_nodes(self, nodes: Collection[str]) -> Mapping[WorkerLife, str]:
        """Begin nothing on these nodes from now on, and return the lives that are there, each with its node's id."""

    async def room(self, *, grows: bool) -> Room:
        """Return what the nodes that stay have for workers; with `grows`, those that may be added for them, too."""


class NodeWatch:
    """Watches over the nodes of one supervisor's workers. Call `start` once, and `close` at the end."""

    def __init__(
        self,
        drained_nodes: Callable[[], Collection[DrainedNode]],
        places: Places,
        supervisor: Supervisor,
        longest_s: float,
        clear: Callable[[Collection[str]], None],
    ) -> None:
        """`drained_nodes` blocks for a call to Ray, and raises UnavailableError. `longest_s` is the notice of a node that
        names no time, in seconds. `clear` is called in a thread with nodes that no worker is on any more: Ray ends there once
        nothing else is.
        """
        self._drained_nodes = drained_nodes
        self._places = places
        self._supervisor = supervisor
        self._longest_s = longest_s
        self._clear = clear
        self._told: dict[str, Leaving] = {}
        """What was said of each node that Ray drains now, by its id."""
        self._problem: str | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask Ray which nodes are drained."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop asking Ray about its nodes. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def look(self) -> None:
        """Ask once, and have done what is due. Raises UnavailableError or TimeoutError if Ray does not answer."""
        async with asyncio.timeout(_ANSWER_S):
            drained = await asyncio.to_thread(self._drained_nodes)
            self._told = {node.node_id: self._of(node) for node in drained}
            if not self._told and not self._supervisor.any_leaving:
                return
            lives = await self._places.leave_nodes(self._told.keys())
            room, growing = await self._places.room(grows=False), await self._places.room(grows=True)
            await asyncio.to_thread(self._clear, self._told.keys() - set(lives.values()))
        told = {life: self._told[node] for life, node in lives.items() if node in self._told}
        self._supervisor.heed(told, time.time(), room.check, growing.check)

    def _of(self, node: DrainedNode) -> Leaving:
        """What a node says, and when it said so first. One that names another time has said something new."""
        known, now = self._told.get(node.node_id), time.time()
        if known is not None and node.leaves_at in (None, known.leaves_at):
            return known
        leaving = Leaving(now, now + self._longest_s if node.leaves_at is None else node.leaves_at)
        log.info("node %s (%s) leaves in %.0f s", node.node_id, node.address, leaving.leaves_at - now)
        return leaving

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
                self._problem = None
            except (UnavailableError, TimeoutError) as failure:
                problem = str(failure) or f"Ray does not answer within {_ANSWER_S:g} s"
                if problem != self._problem:
                    log.warning("nobody knows which nodes will go: %s", problem)
                self._problem = problem
            except Exception:
                log.exception("looking for nodes that will go failed")  # the next look may not
            await asyncio.sleep(LOOK_S)
