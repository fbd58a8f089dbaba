"""Paced workers as lives in shared processes: Ray actors that hold up to `WORKERS_PER_HOST` of them each.

    start: a host with room, or a new one ──► the worker's life in it ──► its end ──► the last life gone: the host ends

A host that dies takes its workers with it: to each its supervisor gives the next life, elsewhere. One that does not answer when
a life is to end is killed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray

from cluster.launcher import Process, Started
from cluster.memory import WORKERS_PER_HOST, WorkerMemory, most_routers
from cluster.ray.actors import (
    PROCESS_PREFIX,
    NamedActor,
    find_actors,
    new_actor,
    node_of_actor,
    node_resources,
    take_up_actors,
)
from cluster.ray.errors import answer
from cluster.ray.paced.host import PacedHost
from cluster.ray.placement import Room
from configs.arithmetic import ceil_div
from configs.schema import ClusterConfig
from protocol.errors import TandemError, WorkerLostError
from protocol.messages.workers import Duty, Role, WorkerLife

_END_S = 15.0
"""Seconds that a host has to end a life before it is killed. A worker that closes slowly takes five of them."""


@dataclass
class Host:
    """A process of paced workers, as its launcher knows it."""

    name: str
    actor: asyncio.Future[NamedActor]
    lives: dict[WorkerLife, Role]
    """Workers that live in this process or begin here, with their roles."""
    leaves: bool = False
    """Whether its node will go, so that nothing begins here."""


class PacedLauncher:
    """A `cluster.launcher.Launcher` of paced workers on the Ray cluster that this process belongs to."""

    def __init__(self, config: ClusterConfig, secret: bytes, memory: Mapping[Role, WorkerMemory]) -> None:
        """`memory` is what a worker of each role takes."""
        self._config = config
        self._secret = secret
        self.memory = memory
        """What a worker of each role takes."""
        self.routers = most_routers(config)
        """How many routers are wanted, which take memory, too."""
        self._hosts: dict[str, Host] = {}

    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Process:
        """Return a process that begins with its `start` or `resume`. The call itself starts nothing."""
        return PacedProcess(self, role, WorkerLife(worker_id, epoch), config)

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        """Take over from a former launcher: keep the hosts of these lives, and remove all else."""
        kept: dict[str, set[WorkerLife]] = {}
        for life, (name, *_) in lives.items():
            kept.setdefault(name, set()).add(life)
        await asyncio.to_thread(take_up_actors, kept, ())
        # Lives that began and were not recorded are nobody's.
        await asyncio.gather(*(_keep(name, own) for name, own in kept.items()))

    def host_for(self, role: Role, life: WorkerLife) -> Host:
        """Return a host with room for one more life, made if need be. The room is taken from now on.

        Lives are spread over as many hosts as the configured workers need, and those of a role first.
        """
        stay = [host for host in self._hosts.values() if not host.leaves]
        room = [host for host in stay if len(host.lives) < WORKERS_PER_HOST]
        wanted = ceil_div(self._config.prefill.workers + self._config.decode.workers, WORKERS_PER_HOST)
        if not room or len(stay) < wanted:
            name = f"{PROCESS_PREFIX}host-{secrets.token_hex(4)}"
            host = self._hosts[name] = Host(name, asyncio.ensure_future(asyncio.to_thread(new_actor, PacedHost, name, {})), {})
        else:
            host = min(room, key=lambda host: (len(host.lives), list(host.lives.values()).count(role)))
        host.lives[life] = role
        return host

    def host_of(self, role: Role, life: WorkerLife, name: str) -> Host:
        """Return the host of this name, which a former launcher made, and where this life is."""
        if name not in self._hosts:
            self._hosts[name] = Host(name, asyncio.ensure_future(asyncio.to_thread(_find, name)), {})
        self._hosts[name].lives[life] = role
        return self._hosts[name]

    async def start_in(self, host: Host, role: Role, life: WorkerLife, config: ClusterConfig) -> Started:
        """Start a life in its host. Raises TandemError."""
        actor = await asyncio.shield(host.actor)
        return cast(Started, await answer(actor.handle.start.remote(role, life, config, self._secret)))

    async def end_in(self, host: Host, life: WorkerLife) -> None:
        """End a life in its host, and the host with its last one, or if it does not answer, or was not found.

        Raises UnavailableError if the GCS does not say whether it is there.
        """
        await asyncio.wait([host.actor])
        found = host.actor.exception() is None
        answers = found and await _ended(host.actor.result().handle, life)
        host.lives.pop(life, None)
        if not answers or not host.lives:
            self._hosts = {name: other for name, other in self._hosts.items() if other is not host}
            for actor in [host.actor.result()] if found else await asyncio.to_thread(find_actors, [host.name]):
                await asyncio.to_thread(ray.kill, actor.handle)

    async def keep_spare(self) -> None:
        """Do nothing: a host that is there is as quick as a spare process."""

    async def leave_nodes(self, nodes: Collection[str]) -> dict[WorkerLife, str]:
        """Begin nothing on these nodes from now on, and return the lives that are there, each with its node's id."""
        found: dict[WorkerLife, str] = {}
        for host in [host for host in self._hosts.values() if host.actor.done() and not host.actor.exception()]:
            node = await asyncio.to_thread(node_of_actor, host.actor.result().handle)
            host.leaves = node in nodes
            if node is not None and host.leaves:
                found |= dict.fromkeys(host.lives, node)
        return found

    async def release(self, worker_id: str) -> None:
        """Do nothing: no resources belong to a paced worker beyond its life."""

    async def room(self, *, grows: bool = True) -> Room:
        """Return what the nodes have for workers now: none is added for paced ones, whether or not it `grows`."""
        return Room(self._config, self.memory, await asyncio.to_thread(node_resources), routers=self.routers, may_grow=False)

    async def why_not_started(self, role: Role) -> str:
        """Say in words for people what keeps a worker of this role from starting."""
        return "this machine is too busy, or starting takes longer than limits.worker_start_s"

    async def close(self) -> None:
        """Do nothing: hosts have ended with their lives."""


class PacedProcess:
    """A `cluster.launcher.Process`: one life in a host."""

    def __init__(self, launcher: PacedLauncher, role: Role, life: WorkerLife, config: ClusterConfig) -> None:
        self._launcher = launcher
        self._role = role
        self._life = life
        self._config = config
        self._host: Host | None = None
        self._ending: asyncio.Future[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the host, by which `resume` finds it."""
        return (self._actor().name,)

    async def start(self) -> Started:
        """Start the worker in a host with room. Raises TandemError if it can't start."""
        self._host = self._launcher.host_for(self._role, self._life)
        return await self._launcher.start_in(self._host, self._role, self._life, self._config)

    async def resume(self, names: Sequence[str]) -> None:
        """Take up the life that a former supervisor has started in the host of this name. Takes the place of `start`."""
        self._host = self._launcher.host_of(self._role, self._life, names[0])
        await asyncio.shield(self._host.actor)

    async def run(self) -> None:
        """Return when the worker was stopped. Raises WorkerLostError when it died, or its host."""
        await answer(self._actor().handle.run.remote(self._life))

    async def drain(self) -> None:
        """Let the worker finish what it has and take nothing new. Returns once nothing is left."""
        await answer(self._actor().handle.drain.remote(self._life))

    async def take_role(self, duty: Duty) -> None:
        """Have the worker do this work from now on, and send back what has not begun of any other."""
        await answer(self._actor().handle.take_role.remote(self._life, duty))

    async def stop(self) -> None:
        """Ask the worker to end. `run` returns when it has."""
        await answer(self._actor().handle.stop.remote(self._life))

    async def kill(self) -> None:
        """End this life, by force if need be: then its host ends, and the others there. Idempotent."""
        if self._host is not None:
            if self._ending is None or self._ending.done():  # the end before may have failed
                self._ending = asyncio.ensure_future(self._launcher.end_in(self._host, self._life))
            await asyncio.shield(self._ending)

    def _actor(self) -> NamedActor:
        assert self._host is not None, "nothing is asked of a process before its start"
        if not self._host.actor.done() or self._host.actor.exception():
            raise WorkerLostError("its process has not come up")
        return self._host.actor.result()


async def _keep(name: str, lives: Collection[WorkerLife]) -> None:
    """End what else lives in this host, or the host if it does not answer."""
    for actor in await asyncio.to_thread(find_actors, [name]):
        try:
            async with asyncio.timeout(_END_S):
                await answer(actor.handle.keep.remote(lives))
        except (TandemError, TimeoutError):
            await asyncio.to_thread(ray.kill, actor.handle)


async def _ended(handle: Any, life: WorkerLife) -> bool:
    """Whether this life was ended by its host, which may be dead or stuck."""
    try:
        async with asyncio.timeout(_END_S):
            await answer(handle.end.remote(life))
    except (TandemError, TimeoutError):
        return False
    return True


def _find(name: str) -> NamedActor:
    found = find_actors([name])
    if not found:
        raise WorkerLostError("it ended while the controller was away")
    return found[0]
