"""What a cluster consists of besides its routers: controller, workers, keepers; and what the routers are made with.

    room? ─► Parts.start: controller ─► HAProxy's settings ─► workers begin
                                                      Parts.settle ─► every worker is ready
                                                      Parts.arguments ─► what the routers are made with

`tandem serve` does this in its own process, and deploys the routers itself (cluster.launch). For `serve deploy` an actor does
it (cluster.ray.deployment), and Serve deploys them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cluster.controller import start_controller
from cluster.memory import WorkerMemory, most_routers
from cluster.ray.actors import node_resources
from cluster.ray.errors import wait_for
from cluster.ray.front import Front, at_head, check_listener, front_of, prepare
from cluster.ray.keepers.audit import start_audit_keeper
from cluster.ray.keepers.rates import start_rate_keeper
from cluster.ray.keepers.streams import start_stream_keeper
from cluster.ray.placement import Room, lacks_entries, pool_of
from cluster.ray.serve_app import RouterArguments
from cluster.router_replicas import check_entries_everywhere
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Role

_LOOK_S = 1.0
"""How often nodes are looked for."""


@dataclass(frozen=True)
class Parts:
    """A cluster's parts on a Ray cluster. Every method raises UnavailableError if the controller is gone."""

    config: ClusterConfig
    secret: bytes
    """What the cluster's processes prove themselves to each other with."""
    controller: Any
    head_resources: dict[str, float]
    """What pins an actor to the head node, where routers and the controller belong; empty where there is one node."""

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        secret: bytes,
        memory: Mapping[Role, WorkerMemory],
        head_resources: dict[str, float],
        *,
        may_grow: bool,
    ) -> Parts:
        """Start the controller, whose workers begin. `memory` is what a worker of each role takes.

        With `may_grow`, nodes may be added to the Ray cluster. Raises ConfigError if the Ray cluster has a controller, or if
        the workers do not fit into memory and no nodes can join. Raises UnavailableError if there is no room for workers and
        routers within the time that a worker has to start.
        """
        _wait_for_room(config, memory, may_grow=may_grow)
        return cls(config, secret, start_controller(config, secret, memory, head_resources, may_grow=may_grow), head_resources)

    def prepare_front(self) -> None:
        """Leave HAProxy's settings where it finds them. Raises ConfigError as `front.prepare` does.

        No sooner than the controller is there: where another cluster runs already, its HAProxy must keep its settings.
        """
        at_head(self.head_resources, prepare, self.config, self.front)

    @cached_property
    def front(self) -> Front | None:
        """The HAProxies before the routers, if Serve works with HAProxy. Asked of the head node once."""
        return at_head(self.head_resources, front_of, self.secret)

    def arguments(self) -> RouterArguments:
        """Return what the routers are made with.

        Raises ConfigError if the entry does not listen where it should, or is not on every node where it should.
        """
        http = self.config.http
        at_head(self.head_resources, check_listener, http.host, http.port)
        if http.router_resources:
            check_entries_everywhere()
        return RouterArguments(
            self.config,
            self.secret,
            self.controller,
            start_rate_keeper(self.config, self.head_resources),
            start_stream_keeper(self.config, self.head_resources),
            start_audit_keeper(self.config, self.head_resources),
            _start_usage_keeper(self.config, self.head_resources),
            self.front,
        )

    def begin_settling(self) -> Any:
        """Return a reference to ask with `ask_controller` until every worker is ready."""
        return self.controller.settle.remote(self.config.limits.worker_start_s)


def ask_controller(reference: Any, deadline_s: float | None = None) -> Any:
    """Return the controller's answer. A `deadline_s` of None is for calls whose deadline the controller keeps.

    Raises the TandemError that it raised, and UnavailableError if it is gone or late.
    """
    return wait_for(reference, deadline_s, "the controller is gone")


def _wait_for_room(config: ClusterConfig, memory: Mapping[Role, WorkerMemory], *, may_grow: bool) -> None:
    """Wait until the nodes take all workers and routers to begin with: nodes may be joining just now."""
    deadline = time.monotonic() + config.limits.worker_start_s
    while True:
        nodes = node_resources()
        room = Room(config, memory, nodes, may_grow=may_grow, routers=most_routers(config))
        try:
            if (problem := lacks_entries(config.http, config.http.router_replicas, nodes)) is None:
                _check_room(config, room)
                return
        except ConfigError as error:
            if not may_grow:
                raise
            problem = error.message
        if time.monotonic() > deadline:
            raise UnavailableError(f"{problem}, after {config.limits.worker_start_s:g} s")
        time.sleep(_LOOK_S)


def _start_usage_keeper(config: ClusterConfig, head_resources: dict[str, float]) -> Any | None:
    """The handle of the owner of the usage log. None means that nobody wants one."""
    if config.telemetry.usage_log is None:
        return None
    from cluster.ray.usage.keeper import start_usage_keeper

    return start_usage_keeper(config.telemetry, head_resources)


def _check_room(config: ClusterConfig, room: Room) -> None:
    """Raise ConfigError if the workers to begin with do not fit into memory."""
    try:
        workers = {role: pool_of(config, role).workers for role in Role}
        room.check({**workers, Role.DECODE: workers[Role.DECODE] + config.autoscale.standby}, [Role.PREFILL, Role.DECODE])
    except InvalidRequestError as error:
        problem = f"{error.message}; want fewer workers, or a smaller {error.param}.kv_cache_tokens"
        raise ConfigError(problem, param=f"{error.param}.workers") from None
