"""Worker processes as Ray actors: one placement group per worker id, one detached named actor per rank and life.

A placement group is made with a worker's first life and given back by `release`; the lives in between follow each other in
it. Actors are detached and carry no restart policy of Ray's: the supervisor alone decides about new lives. Ray's calls that
create and remove things block, so they run in threads; a creation that was cancelled half-way is ended by `kill`.

A controller that was started anew finds these actors by their names, and the groups by their workers' (`take_up`).

On a cluster of one node whose pools reserve nothing (a laptop), one spare process waits with everything imported. It takes
the place of the next worker that dies, outside of that worker's placement group, which holds next to nothing there. The
next spare is made when no worker has come or gone for some seconds, for it takes a core that resumed streams need. `keep_spare`
begins that, `close` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.launcher import Process, Started
from cluster.memory import WorkerMemory, most_routers
from cluster.ray.actors import (
    NAME_PREFIX,
    PROCESS_PREFIX,
    NamedActor,
    find_actors,
    new_actor,
    node_resources,
    nodes_of_groups,
    take_up_actors,
)
from cluster.ray.errors import answer
from cluster.ray.placement import Resources, Room, bundle_of, listed, missing, pool_of, threads_per_rank
from cluster.ray.worker_process import WorkerProcess
from configs.schema import ClusterConfig
from protocol.errors import TandemError, WorkerLostError
from protocol.messages.workers import Duty, Role, WorkerLife

log = logging.getLogger(__name__)

_QUIET_S = 5.0
"""Seconds without workers that come or go, before the next spare process is made."""
_ALIVE_S = 5.0
"""Seconds in which a spare process answers, or it is taken for dead."""


class RayLauncher:
    """A `cluster.launcher.Launcher` that makes workers as actors on the Ray cluster that this process belongs to."""

    def __init__(self, config: ClusterConfig, secret: bytes, memory: Mapping[Role, WorkerMemory], *, may_grow: bool) -> None:
        """`memory` is what a worker of each role takes. With `may_grow`, nodes may be added to the Ray cluster."""
        self._config = config
        self._secret = secret
        self.memory = memory
        """What a worker of each role takes."""
        self.routers = most_routers(config)
        """How many routers are wanted, which take memory, too."""
        self._may_grow = may_grow
        self._groups: dict[str, PlacementGroup] = {}
        self._epochs: dict[str, int] = {}
        """The latest life that was begun in each worker's group."""
        self._leaving: frozenset[str] = frozenset()
        """Ids of the nodes on which nothing is begun."""
        self._keeps_spare = False
        self._spare: asyncio.Task[NamedActor | None] | None = None
        self._next_spare: asyncio.TimerHandle | None = None

    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Process:
        """Return a process that begins with its `start` or `resume`. The call itself starts nothing."""
        return RayProcess(self, role, worker_id, epoch, config)

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        """Take over from a former launcher: keep these lives and the resources of these workers, and remove all else."""
        kept = {name for names in lives.values() for name in names}
        self._groups = await asyncio.to_thread(take_up_actors, kept, worker_ids)
        self._epochs = dict(lives.keys())
        await self.keep_spare()

    async def create(self, role: Role, worker_id: str, epoch: int) -> list[NamedActor]:
        """Return an actor for each rank of this life.

        The first rank takes the spare process if there is one that answers, and no second node has joined. All others are new,
        and perhaps not placed yet.
        """
        self._no_spare_yet()
        spare = await self._take_spare()
        actors = [] if spare is None else [spare]
        try:
            if spare is not None and not (await self._has_one_node() and await _answers(spare)):
                await asyncio.to_thread(ray.kill, actors.pop().handle)
            await asyncio.to_thread(self._add_in_group, actors, role, worker_id, epoch)
        except Exception:
            await asyncio.gather(*(asyncio.to_thread(ray.kill, actor.handle) for actor in actors))
            raise
        return actors

    async def start_arguments(self, role: Role, config: ClusterConfig) -> tuple[ClusterConfig, bytes, int]:
        """Return what a process needs to know to become a rank of a worker of this role."""
        nodes = await asyncio.to_thread(node_resources)
        return config, self._secret, threads_per_rank(config, role, nodes)

    def changed(self) -> None:
        """Note that a worker has come or gone. The next spare process waits until the present workers have settled."""
        self._no_spare_yet()
        if self._keeps_spare and self._spare is None:
            self._next_spare = asyncio.get_running_loop().call_later(_QUIET_S, self._begin_spare)

    async def keep_spare(self) -> None:
        """Keep a spare process from now on, where one makes sense. It begins when the start of the cluster is over."""
        reserves = any(pool_of(self._config, role).resources for role in Role)
        self._keeps_spare = not reserves and await self._has_one_node()
        self.changed()

    async def leave_nodes(self, nodes: Collection[str]) -> dict[WorkerLife, str]:
        """Begin nothing on these nodes from now on, and return the lives that are there, each with its node's id."""
        self._leaving = frozenset(nodes)
        found = await asyncio.to_thread(nodes_of_groups)
        lives = [WorkerLife(*each) for each in list(self._epochs.items())]  # a copy: lives begin in other threads
        groups = {life: group for life in lives if (group := self._groups.get(life.worker_id)) is not None}
        homes = {life: found.get(group.id.hex()) for life, group in groups.items()}
        return {life: node for life, node in homes.items() if node in self._leaving}

    async def release(self, worker_id: str) -> None:
        """Give the worker's resources back, once none of its lives needs them. Idempotent."""
        self._epochs.pop(worker_id, None)
        group = self._groups.pop(worker_id, None)
        if group is not None:
            try:
                await asyncio.to_thread(remove_placement_group, group)
            except BaseException:
                self._groups.setdefault(worker_id, group)  # still ours: the next call removes it, or the next life has it
                raise

    async def room(self, *, grows: bool = True) -> Room:
        """Return what the nodes have for workers; with `grows`, those that may be added for them, too."""
        may_grow = grows and self._may_grow
        return Room(self._config, self.memory, await asyncio.to_thread(node_resources), routers=self.routers, may_grow=may_grow)

    async def why_not_started(self, role: Role) -> str:
        """Say in words for people what keeps a worker of this role from starting."""
        nodes = await asyncio.to_thread(node_resources)
        pool = pool_of(self._config, role)
        taken = f"its resources ({listed(bundle_of(pool))} for each rank) are taken"
        return missing(pool, nodes) or f"{taken}, or loading takes longer than limits.worker_start_s"

    async def close(self) -> None:
        """End the spare process. Call it after the last `create`."""
        self._keeps_spare = False
        self._no_spare_yet()
        if (spare := await self._take_spare()) is not None:
            await asyncio.to_thread(ray.kill, spare.handle)

    def _add_in_group(self, actors: list[NamedActor], role: Role, worker_id: str, epoch: int) -> None:
        """Add the ranks that are missing."""
        pool = pool_of(self._config, role)
        bundle = bundle_of(pool)
        bundles = [bundle] * pool.tensor_parallel_size
        former = self._groups.get(worker_id)
        if former is not None and not self._fits(former, bundles):
            remove_placement_group(former)
            del self._groups[worker_id]
        if worker_id not in self._groups:
            self._groups[worker_id] = placement_group(
                bundles, strategy="STRICT_PACK", name=NAME_PREFIX + worker_id, lifetime="detached"
            )
        self._epochs[worker_id] = epoch
        for rank in range(len(actors), pool.tensor_parallel_size):
            group = PlacementGroupSchedulingStrategy(self._groups[worker_id], placement_group_bundle_index=rank)
            name = f"{PROCESS_PREFIX}{worker_id}-{epoch}" + (f"-rank-{rank}" if rank else "")
            actors.append(new_actor(WorkerProcess, name, bundle, scheduling_strategy=group))

    def _fits(self, former: PlacementGroup, bundles: Sequence[Resources]) -> bool:
        """Not one of a worker of another role that had this id, nor one on a node that goes."""
        return former.bundle_specs == bundles and (
            not self._leaving or nodes_of_groups().get(former.id.hex()) not in self._leaving
        )

    def _begin_spare(self) -> None:
        if self._spare is None:
            self._spare = asyncio.get_running_loop().create_task(self._make_spare())

    def _no_spare_yet(self) -> None:
        if self._next_spare is not None:
            self._next_spare.cancel()

    async def _take_spare(self) -> NamedActor | None:
        """The spare process, which nobody else has then; None if there is none."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        # One that is not ready yet is still ahead of one that would begin now and compete with it.
        await asyncio.wait([spare])
        return None if spare.exception() is not None else spare.result()

    async def _has_one_node(self) -> bool:
        """Where there are several, a process outside of its worker's group may be on another node than the group."""
        return len(await asyncio.to_thread(node_resources)) == 1

    async def _make_spare(self) -> NamedActor | None:
        if not await self._has_one_node():  # another has joined
            return None
        # By chance, for one that another controller has made may be a worker now.
        actor = await asyncio.to_thread(new_actor, WorkerProcess, f"{PROCESS_PREFIX}spare-{secrets.token_hex(4)}", {})
        start_s = self._config.limits.worker_start_s
        try:
            async with asyncio.timeout(start_s):
                await answer(actor.handle.warm_up.remote())
        except (TandemError, TimeoutError) as failure:
            log.warning("no spare process: %s", str(failure) or f"it did not come up within {start_s:g} s")
            await asyncio.to_thread(ray.kill, actor.handle)
            raise
        return actor


class RayProcess:
    """A `cluster.launcher.Process` of Ray actors, one for each rank of one life, from their creation to their end."""

    def __init__(self, launcher: RayLauncher, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> None:
        self._launcher = launcher
        self._role = role
        self._worker_id = worker_id
        self._epoch = epoch
        self._config = config
        self._creation: asyncio.Task[list[NamedActor]] | None = None
        self._former: Sequence[str] = ()
        """Names of the actors that are taken up."""
        self._following: list[asyncio.Future[Any]] = []
        """The calls of `run` on the ranks other than the first."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the actors, in the order of the ranks, by which `resume` finds them."""
        return tuple(actor.name for actor in self._actors())

    async def start(self) -> Started:
        """Start the worker: create its actors, load the model and listen. Raises TandemError if a rank fails."""
        creation = self._launcher.create(self._role, self._worker_id, self._epoch)
        self._creation = asyncio.get_running_loop().create_task(creation)
        await asyncio.shield(self._creation)
        first, *others = self._handles()
        arguments = await self._launcher.start_arguments(self._role, self._config)
        following = await asyncio.gather(
            *(
                answer(other.follow.remote(self._role, self._worker_id, rank, *arguments))
                for rank, other in enumerate(others, start=1)
            )
        )
        waiting = answer(first.start.remote(self._role, self._worker_id, self._epoch, *arguments, following))
        started = await self._while_running(others, waiting)
        self._launcher.changed()
        return cast(Started, started)

    async def resume(self, names: Sequence[str]) -> None:
        """Take up the actors that a former supervisor has created under these names. Takes the place of `start`."""
        self._former = names
        self._creation = asyncio.get_running_loop().create_task(asyncio.to_thread(find_actors, names))
        if len(await asyncio.shield(self._creation)) < len(names):
            raise WorkerLostError("it ended while the controller was away")

    async def run(self) -> None:
        """Return when the worker was stopped. Raises WorkerLostError when one of its ranks died."""
        first, *others = self._handles()
        await self._while_running(others, answer(first.run.remote()))

    async def drain(self) -> None:
        """Let the worker finish what it has and take nothing new. Returns once nothing is left."""
        await answer(self._handles()[0].drain.remote())

    async def take_role(self, duty: Duty) -> None:
        """Have the worker do this work from now on, and send back what has not begun of any other."""
        await answer(self._handles()[0].take_role.remote(duty))

    async def stop(self) -> None:
        """Ask the worker to end. `run` returns when it has."""
        await answer(self._handles()[0].stop.remote())

    async def kill(self) -> None:
        """Kill all actors of this life. Idempotent. Raises UnavailableError if the GCS does not say whether they are there."""
        if self._creation is None:
            return
        self._launcher.changed()
        await asyncio.wait([self._creation])
        if self._creation.exception() is None:
            actors = self._actors()
        else:  # what could not be made is killed already, but what could not be found may live
            actors = await asyncio.to_thread(find_actors, self._former)
        await asyncio.gather(*(asyncio.to_thread(ray.kill, actor.handle) for actor in actors))
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _while_running(self, others: Sequence[Any], waiting: Coroutine[Any, Any, Any]) -> Any:
        """What the first rank answers. Raises if one of the other ranks ends before."""
        if not self._following:
            self._following = [asyncio.ensure_future(answer(other.run.remote())) for other in others]
        first = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((first, *self._following), return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                return first.result()
            ended = next(other for other in self._following if other.done())
            ended.result()
            raise WorkerLostError("a rank has ended")
        finally:
            first.cancel()

    def _actors(self) -> list[NamedActor]:
        assert self._creation is not None, "nothing is asked of a process before its start"
        return self._creation.result()

    def _handles(self) -> list[Any]:
        return [actor.handle for actor in self._actors()]


async def _answers(spare: NamedActor) -> bool:
    """Whether a spare process lives: it may have ended since it was made."""
    try:
        async with asyncio.timeout(_ALIVE_S):
            await answer(spare.handle.warm_up.remote())
    except (TandemError, TimeoutError):
        return False
    return True
