"""Bring a whole cluster up and take it down again: what `tandem serve` does between its flags and Ctrl-C.

    check keys, model, port ─► Ray ─► controller ─► pools start ──────────────► settled ─► reported ─► followed
                                         └────────► Serve, HAProxy, routers ─────┘                        │
                                                                Ctrl-C, SIGTERM or a failure ─► down ◄────┘

A Ray cluster that was joined may have a cluster already, which outlived its `tandem serve`, as it outlives the head node with
Redis. If it has the same configuration it is taken up, then followed and taken down like one that was started here.

Everything that can be found wrong before a process is started is found there. A failure at any step, and the end, leave
nothing behind: a local Ray instance ends with all its processes; in a Ray cluster that was joined, the workers, the
controller and the Serve application are removed one by one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from cluster.gpu_shares import runs_as, with_gpu_shares
from cluster.health import wait_healthy
from cluster.memory import role_memory
from cluster.open_requests import RESTARTED_ANSWER_S, RETIRE_ANSWER_S
from cluster.ray.front import HEAD_RESOURCES
from cluster.ray.placement import unplaceable
from cluster.ray.session import joined_ray, local_ray
from configs.facts import ModelFacts
from configs.schema import ClusterConfig, HttpConfig
from kv_transfer.tiers.occupied import remove_left_in_time
from protocol.cluster_view import ClusterView
from protocol.errors import ConfigError, UnavailableError

Report = Callable[[str], None]
"""A function that is told what is being done, in words for people."""
_RUNS_ALREADY = "runs on this Ray cluster already; `tandem stop` ends it"
_LET_GO_S = 30.0
"""Seconds in which the GCS notices that a process ended together with its node."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class _Place:
    """What kind of Ray the cluster runs on."""

    head_resources: dict[str, float]
    """What pins an actor to the head node, where routers and the controller belong."""
    may_grow: bool
    """Nodes may join later, so a pool that does not fit now is not impossible."""
    ends_with_us: bool
    """Ray ends when this process does, and everything on it."""


_LOCAL = _Place({}, may_grow=False, ends_with_us=True)
_JOINED = _Place(HEAD_RESOURCES, may_grow=True, ends_with_us=False)


class RunningCluster:
    """A cluster that serves; made by `running_cluster`."""

    def __init__(self, controller: Any, config: ClusterConfig) -> None:
        """`config` is what it runs with: shares of GPUs are in it."""
        self.controller = controller
        self.config = config

    def retire(self, deadline_s: float) -> int:
        """Let in no new requests, and wait until none runs, or for `deadline_s` seconds. Return how many still run.

        Raises UnavailableError if the controller is gone.
        """
        from cluster.ray.parts import ask_controller

        return int(ask_controller(self.controller.retire.remote(deadline_s), deadline_s + RETIRE_ANSWER_S))

    def watch(self, known_version: int) -> ClusterView:
        """Return the view when it is a new one, or after 10 s. Raises UnavailableError if the controller is gone."""
        from cluster.ray.parts import ask_controller

        return cast(ClusterView, ask_controller(self.controller.watch.remote(known_version)))


@contextmanager
def running_cluster(config: ClusterConfig, facts: ModelFacts, address: str | None, report: Report) -> Iterator[RunningCluster]:
    """Start everything, yield once every worker is ready and HTTP answers, then take it down.

    `facts` are the model's, which has been checked.

    `address` is a Ray cluster to join, whose GPUs workers share; None starts a Ray instance of our own. A cluster that runs
    there with this configuration is taken up if nobody follows it any more. Raises ConfigError for whatever the operator can
    mend, UnavailableError when nobody answers at `address` or the cluster does not get ready in time.
    """
    if address is None:
        report("Ray")
        try:
            with local_ray(), _pools_and_http(config, facts, _LOCAL, report) as cluster:
                yield cluster
        finally:
            if config.kv_offloading.memory_gib is not None:
                remove_left_in_time()
    else:
        report(f"Ray cluster at {address}")
        with joined_ray(address):
            from cluster.ray.actors import node_resources

            if (running := _running_already(config, report)) is not None:
                with _taken_up(running, report):
                    yield running
                return
            sharing = with_gpu_shares(config, node_resources())
            with _pools_and_http(sharing, facts, _JOINED, report) as cluster:
                yield cluster


def _running_already(config: ClusterConfig, report: Report) -> RunningCluster | None:
    """The cluster that runs on the Ray cluster, whose `tandem serve` has ended, or None if there is none to go on with.

    Raises ConfigError if it has another configuration, or if somebody else is to end it: a `tandem serve` that lives, or Serve.
    """
    from cluster.controller import find_controller
    from cluster.ray.parts import ask_controller
    from cluster.teardown import remove_cluster

    if find_controller() is None:
        return None
    report("waiting for the end of the cluster's former `tandem serve`")
    left_by = _left_by()
    if (controller := find_controller()) is None:
        return None  # who followed it has removed it
    if left_by is None:
        raise ConfigError(f"a Tandem cluster {_RUNS_ALREADY}", param="address")
    known = ask_controller(controller.configurations.remote(), RESTARTED_ANSWER_S)
    cluster = RunningCluster(controller, known[0])
    if cluster.watch(0).stopping:  # it lets in no requests any more
        _retire(cluster)
        remove_cluster(own=controller)
        return None
    running = next((each for each in known if runs_as(config, each)), None)
    if running is None:
        raise ConfigError(f"a Tandem cluster with another configuration {_RUNS_ALREADY}", param="address")
    _follow(left_by)
    return RunningCluster(controller, running)


def _left_by() -> str | None:
    """The job id of the `tandem serve` that followed the cluster, if it has ended."""
    from cluster.ray.actors import job_has_ended
    from cluster.records import noted_follower

    if (follower := noted_follower()) is None:
        return None
    deadline = time.monotonic() + _LET_GO_S
    while not (ended := job_has_ended(follower)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return follower if ended else None


@contextmanager
def _taken_up(cluster: RunningCluster, report: Report) -> Iterator[None]:
    """Follows the cluster as soon as HTTP answers, also if workers are missing: it may serve without them."""
    from cluster.teardown import remove_cluster

    try:
        report("HTTP of the cluster that runs already")
        _wait_for_answers(cluster)
        yield
    finally:
        remove_cluster(memory_tiers=cluster.config.kv_offloading.memory_gib is not None, own=cluster.controller)


def _wait_for_answers(cluster: RunningCluster) -> None:
    deadline = time.monotonic() + cluster.config.limits.worker_start_s
    try:
        while not _answers(cluster.config.http, deadline):
            time.sleep(_LOOK_S)  # Ray is starting the routers
    except KeyboardInterrupt:
        _retire(cluster)  # it may answer somebody, if not this machine
        raise


def _answers(http: HttpConfig, deadline: float) -> bool:
    """Whether the cluster answers, at one of its entries. Raises UnavailableError after the deadline: it may never have had
    routers, and the next start makes a new one.
    """
    try:
        if http.router_resources:
            from cluster.ray.keepers.entries import wait_for_an_entry

            wait_for_an_entry(http)
        else:
            wait_healthy(http)
    except UnavailableError:
        if time.monotonic() > deadline:
            raise
        return False
    return True


def _retire(cluster: RunningCluster) -> None:
    """Leave its requests the time that its configuration says, if its controller answers."""
    with suppress(UnavailableError):
        cluster.retire(cluster.config.limits.shutdown_s)


def _follow(former: str | None) -> None:
    """Have others know that this process is the one that ends the cluster. Raises ConfigError if somebody else has followed the
    `former` one meanwhile.
    """
    from cluster.ray.actors import own_job
    from cluster.records import note_follower, noted_follower

    if noted_follower() != former:
        raise ConfigError(f"a Tandem cluster {_RUNS_ALREADY}", param="address")
    note_follower(own_job())


@contextmanager
def _pools_and_http(config: ClusterConfig, facts: ModelFacts, place: _Place, report: Report) -> Iterator[RunningCluster]:
    from cluster.controller import find_controller
    from cluster.ray.actors import node_resources
    from cluster.ray.parts import Parts, ask_controller
    from cluster.ray.serve_app import deploy_router, start_http
    from cluster.teardown import remove_cluster, sweep

    if not place.may_grow and (reason := unplaceable(config, node_resources())) is not None:
        raise ConfigError(f"impossible pool: {reason}")
    # Serve sets its own level when it is imported, and says at INFO what the progress line says already.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    memory = role_memory(config, facts)
    if not place.ends_with_us and find_controller() is None:
        sweep()  # of a cluster whose controller died
    report("room for workers and routers")
    parts = Parts.start(config, os.urandom(32), memory, place.head_resources, may_grow=place.may_grow)
    try:
        if not place.ends_with_us:
            _follow(None)
        parts.prepare_front()
        settled = parts.begin_settling()
        report("workers and router")
        start_http(config.http, has_front=parts.front is not None)
        deploy_router(parts.arguments(), place.head_resources)
        report("workers")
        ask_controller(settled)
        report("HTTP")
        if config.http.router_resources:
            from cluster.ray.keepers.entries import wait_for_entries

            wait_for_entries(config.http)
        else:
            wait_healthy(config.http)
        yield RunningCluster(parts.controller, config)
    finally:
        if not place.ends_with_us:
            remove_cluster(memory_tiers=config.kv_offloading.memory_gib is not None, own=parts.controller)
