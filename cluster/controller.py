"""The controller: a named actor around the supervisor, and the routers' way to it.

One per Ray cluster, detached, without resources of its own, so that it outlives whoever started it. `tandem serve` makes it,
or takes up one that it finds (cluster.launch). Routers watch it. `tandem stop` and the end of `tandem serve` close it: its
workers end with it, and it ends last.

If its process dies, Ray starts it again, with the same handle, and it takes up its workers (cluster.supervision). Who waits in
`settle` or `watch` then waits for the next one; what is ordered meanwhile fails. One that can't be made ends its process, so
that Ray tries once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayTaskError

from cluster.memory import WorkerMemory, role_memory
from cluster.nodes.gcs import own_gcs
from cluster.nodes.watch import NodeWatch
from cluster.open_requests import OpenRequests
from cluster.ray.actors import NAME_PREFIX, NAMESPACE, find_actor, made_until_it_works, move_stream_keeper
from cluster.ray.errors import original
from cluster.ray.front import counts_folder, front_of
from cluster.ray.launcher import RayLauncher
from cluster.ray.paced.launcher import PacedLauncher
from cluster.records import pool_records, scaler_records
from cluster.rollout.driver import Rollouts
from cluster.rollout.room import RolloutRoom
from cluster.router_replicas import RouterReplicas
from cluster.sizer import PoolSizer, known_step_times
from cluster.supervision.supervisor import Supervisor
from configs.models import all_here, resolve_for
from configs.schema import ClusterConfig
from protocol.cluster_view import SCALED_BY_HAND, ClusterView, RolloutObservation, RolloutOrder, RouterObservation
from protocol.errors import ConfigError, InvalidRequestError, TandemError
from protocol.messages.workers import Duty, Role
from telemetry.counts_folder import num_places
from telemetry.logging import setup_logging

log = logging.getLogger(__name__)

CONTROLLER = NAME_PREFIX + "controller"


class Controller:
    """The actor around the supervisor. All of its methods answer at once but `settle`, `watch`, `retire` and `close`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: ClusterConfig, secret: bytes, memory: Mapping[Role, WorkerMemory], may_grow: bool
    ) -> None:
        setup_logging("controller")
        async with made_until_it_works():
            await self._begin(config, secret, memory, may_grow=may_grow)

    async def _begin(
        self, config: ClusterConfig, secret: bytes, memory: Mapping[Role, WorkerMemory], *, may_grow: bool
    ) -> None:
        self._config = config
        self._launcher = _launcher(config, secret, memory, may_grow=may_grow)
        self._supervisor = Supervisor(config, self._launcher, pool_records())
        self._open_requests = OpenRequests(await _router_count(config, secret))
        self._router_replicas = RouterReplicas()
        goes_on = await self._supervisor.start()
        if goes_on and (routers := self._supervisor.view().routers) is not None:
            self._launcher.routers = routers
            self._router_replicas.want(routers)  # of which Serve may not have heard yet
        self._nodes: NodeWatch | None = None
        if may_grow:  # a Ray cluster that was joined, whose nodes come and go
            gcs = await asyncio.to_thread(own_gcs)
            longest_s = config.limits.drain_s
            self._nodes = NodeWatch(gcs.drained_nodes, self._launcher, self._supervisor, longest_s, self._clear)
            self._nodes.start()
        if (changed := self._supervisor.pools.config) is not config:
            await self._expect_changed(changed)
        room = RolloutRoom(partial(self._launcher.room, grows=False), self._expect, self._launcher.memory)
        self._rollouts = Rollouts(self._supervisor, room, self._heed_rollout)
        self._sizer: PoolSizer | None = None
        if config.autoscale.wanted:
            times = await asyncio.to_thread(known_step_times, config)
            self._sizer = PoolSizer(config, times, self._supervisor, self._launcher.room, scaler_records())
            await self._sizer.start()
        self._rollouts.resume()
        await self._heed_rollout()  # there are two records, and the former controller may have written one of them

    @ray.method(max_task_retries=-1)
    async def settle(self, deadline_s: float) -> None:
        """Wait at most `deadline_s` seconds until every wanted worker is READY.

        Raises ConfigError if a worker can't start, UnavailableError if one is not ready in time.
        """
        await self._supervisor.settle(deadline_s)
        await self._launcher.keep_spare()

    @ray.method(max_task_retries=-1)
    async def watch(self, known_version: int) -> ClusterView:
        """Return the view when its version differs from `known_version`, or after 10 s."""
        return await self._supervisor.watch(known_version)

    @ray.method(max_task_retries=-1)
    async def configurations(self) -> tuple[ClusterConfig, ClusterConfig]:
        """Return the configuration that the cluster was started with, and the one that was rolled out last."""
        return self._config, self._supervisor.pools.config

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        """Want this many workers of these roles, and so many routers, from now on. None leaves the routers as they are.

        Raises InvalidRequestError for impossible numbers.
        """
        room = await self._launcher.room()
        if sizes:
            self._rollouts.check_none()
        if routers is not None:
            room = room.with_routers(routers)
            if routers > self._launcher.routers:
                pools = self._supervisor.pools
                room.check_routers(pools.with_standby({**pools.wanted(), **sizes}))
        self._supervisor.scale(sizes, room.check, routers)
        if routers is not None:
            self._launcher.routers = routers
            self._router_replicas.want(routers)
        await self._saved(SCALED_BY_HAND if sizes else None)

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Let a worker go, or start it anew with `restart`. Raises InvalidRequestError if it can't be spared."""
        self._rollouts.check_none()
        self._supervisor.drain(worker_id, restart)
        await self._saved(None if restart else f"{worker_id} was drained by hand")

    async def flip(self, worker_id: str, duty: Duty) -> None:
        """Have a worker do this work from now on. Raises InvalidRequestError if it can't."""
        self._rollouts.check_none()
        self._supervisor.flip(worker_id, duty)
        await self._saved(f"{worker_id} was flipped by hand")

    async def observe(self, seen: RouterObservation) -> None:
        """Take what a router tells the autoscaler."""
        if self._sizer is not None:
            await self._sizer.observe(seen)

    async def autoscale(self, paused: str | None) -> None:
        """Pause the autoscaler for this reason, or have it go on. Raises InvalidRequestError if there is none."""
        if self._sizer is None:
            problem = "this cluster does not size itself: it was started without --autoscale"
            raise InvalidRequestError(problem, param="autoscale")
        self._rollouts.check_none()
        await (self._sizer.resume() if paused is None else self._sizer.pause(paused))

    async def roll_out(self, order: RolloutOrder) -> int:
        """Begin to roll a new configuration out. Return its revision.

        Raises InvalidRequestError if it can't be, or another one is.
        """
        revision = self._rollouts.begin(order)
        await self._heed_rollout()
        await self._supervisor.recorder.saved()
        return revision

    async def abort_rollout(self) -> int:
        """Have the workers' former configuration back. Return the revision that is given up.

        Raises InvalidRequestError if none is rolled out.
        """
        return self._rollouts.abort()

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        """Take what a router sees of a rollout."""
        self._rollouts.watch.observe(seen)

    async def _heed_rollout(self) -> None:
        if self._sizer is not None:
            await self._sizer.heed_rollout(runs=self._rollouts.runs)

    async def _expect_changed(self, changed: ClusterConfig) -> None:
        """Count with what the workers of a configuration take that was rolled out. They run also where its model is gone.

        What would have to be fetched is not: nobody is watched or answered meanwhile.
        """
        try:
            self._expect(await asyncio.to_thread(_memory_by_files, changed))
        except Exception as error:  # noqa: BLE001 (whatever ails the files)
            log.warning("nobody knows what the workers take now, so as much as at the start is taken for it: %r", error)

    def _expect(self, memory: Mapping[Role, WorkerMemory]) -> None:
        self._launcher.memory = memory

    async def _saved(self, pause: str | None) -> None:
        """Returns when an order is recorded, or after some seconds. `pause`: why the autoscaler leaves workers to operators."""
        saved = asyncio.create_task(self._supervisor.recorder.saved())  # beside the other record, for an answer in time
        if self._sizer is not None and pause is not None:
            await self._sizer.pause(f"{pause}; `tandem autoscale resume` goes on")
        await saved

    @ray.method(max_task_retries=-1)
    async def retire(self, deadline_s: float) -> int:
        """Let in no new requests, and wait until none runs, or for `deadline_s` seconds. Return how many still run."""
        await self._rollouts.close()
        if self._sizer is not None:
            await self._sizer.close()
        self._supervisor.stop_admission()
        return await self._open_requests.none_left(deadline_s)

    async def note_open_requests(self, router_id: str, count: int) -> None:
        """Note how many requests still run at a router."""
        self._open_requests.note(router_id, count)

    def _clear(self, nodes: Collection[str]) -> None:
        """Move what else keeps these nodes, on which no worker is, from ending. Blocks for calls to Ray."""
        move_stream_keeper(nodes)
        if nodes and self._supervisor.pools.config.http.router_resources:
            from cluster.ray.keepers.entries import leave_entries

            leave_entries(nodes)

    async def close(self) -> None:
        """End all workers. The caller then kills the actor."""
        if self._nodes is not None:
            await self._nodes.close()
        await self._rollouts.close()
        if self._sizer is not None:
            await self._sizer.close()
        await self._supervisor.close()
        await self._launcher.close()


def start_controller(
    config: ClusterConfig,
    secret: bytes,
    memory: Mapping[Role, WorkerMemory],
    head_resources: dict[str, float],
    *,
    may_grow: bool,
) -> Any:
    """Return the handle of a new controller, whose pools are starting. Raises ConfigError if this Ray cluster has one.

    `memory` is what a worker of each role takes. With `may_grow`, nodes may be added to the Ray cluster.
    """
    options: dict[str, Any] = {
        "name": CONTROLLER,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": head_resources,
        "max_restarts": -1,
    }
    try:
        return _actor_class().options(**options).remote(config, secret, memory, may_grow)
    except ValueError:
        raise ConfigError("a Tandem cluster runs on this Ray cluster already; `tandem stop` ends it", param="address") from None


def _memory_by_files(config: ClusterConfig) -> Mapping[Role, WorkerMemory]:
    """What a worker of each role takes. Raises ConfigError if a model does not lie on this machine."""
    if not all_here(config):
        raise ConfigError("the model is not on this machine", param="model")
    return role_memory(config, resolve_for(config).facts)


async def _router_count(config: ClusterConfig, secret: bytes) -> Callable[[], Awaitable[int]]:
    """Who tells how many routers there are. Where they may be on any node, the head is told of its entry, as others are."""
    if not config.http.router_resources:
        return _num_here
    from cluster.ray.keepers.entries import AllEntries, prepare_node

    try:
        await prepare_node(config, front_of(secret))
    except TandemError as error:
        log.warning("the head's entry is not as it should be: %s", error.message)
    return AllEntries().num_routers


async def _num_here() -> int:
    return num_places(counts_folder())


def _launcher(
    config: ClusterConfig, secret: bytes, memory: Mapping[Role, WorkerMemory], *, may_grow: bool
) -> RayLauncher | PacedLauncher:
    if config.engine == "paced":
        return PacedLauncher(config, secret, memory)
    return RayLauncher(config, secret, memory, may_grow=may_grow)


def _actor_class() -> Any:
    return ray.remote(Controller)


def find_controller() -> Any | None:
    """Return the handle of this Ray cluster's controller, or None if there is none for certain.

    Raises UnavailableError if the GCS does not answer.
    """
    return find_actor(CONTROLLER)


class RayControllerClient:
    """The router's client of the controller (`router.dispatch.controller_client.ControllerClient`), over an actor handle.

    Every method raises UnavailableError if the controller is gone.
    """

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    async def watch(self, known_version: int) -> ClusterView:
        """Return the view when its version differs from `known_version`, or after 10 s."""
        return cast(ClusterView, await self._controller.watch.remote(known_version))

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        """Want this many workers of these roles, and so many routers, from now on. None leaves the routers as they are.

        Raises InvalidRequestError for impossible numbers.
        """
        await _answered(self._controller.scale.remote(dict(sizes), routers))

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Let a worker go, or start it anew with `restart`. Raises InvalidRequestError if it can't be spared."""
        await _answered(self._controller.drain.remote(worker_id, restart))

    async def flip(self, worker_id: str, duty: Duty) -> None:
        """Have a worker do this work from now on. Raises InvalidRequestError if it can't."""
        await _answered(self._controller.flip.remote(worker_id, duty))

    async def observe(self, seen: RouterObservation) -> None:
        """Tell the autoscaler what is asked of this router, and what workers do."""
        await self._controller.observe.remote(seen)

    async def autoscale(self, paused: str | None) -> None:
        """Pause the autoscaler for this reason, or have it go on. Raises InvalidRequestError if there is none."""
        await _answered(self._controller.autoscale.remote(paused))

    async def roll_out(self, order: RolloutOrder) -> int:
        """Begin to roll a new configuration out. Return its revision.

        Raises InvalidRequestError if it can't be, or another one is.
        """
        return int(await _answered(self._controller.roll_out.remote(order)))

    async def abort_rollout(self) -> int:
        """Have the workers' former configuration back. Return the revision that is given up.

        Raises InvalidRequestError if none is rolled out.
        """
        return int(await _answered(self._controller.abort_rollout.remote()))

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        """Tell what this router sees of a rollout."""
        await self._controller.observe_rollout.remote(seen)

    async def note_open_requests(self, router_id: str, count: int) -> None:
        """Tell how many requests still run at this router."""
        await self._controller.note_open_requests.remote(router_id, count)


async def _answered(reference: Any) -> Any:
    """What the controller answers. Raises the TandemError that it raised."""
    try:
        return await reference
    except RayTaskError as error:
        raise original(error) from None
