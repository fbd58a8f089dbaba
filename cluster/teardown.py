"""Take a Tandem cluster off a Ray cluster that stays: workers, placement groups, controller, Serve application.

The controller, if it is there, ends its own workers. What is left after that, or was left by a controller that died, is known
by its name in Ray's books. Called by `tandem stop`, by the end of a `tandem serve` that joined, before one starts, and after
`serve shutdown` (cluster.ray.deployment). Two may do it at once: what one of them finds gone, the other has removed.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.controller import CONTROLLER, find_controller
from cluster.open_requests import RESTARTED_ANSWER_S, RETIRE_ANSWER_S
from cluster.ray.actors import NAMESPACE, named_groups, own_names
from cluster.ray.front import HEAD_RESOURCES, at_head, withdraw
from cluster.ray.keepers.entries import withdraw_entries
from cluster.records import delete_records
from cluster.router_replicas import APPLICATION, remove_application
from kv_transfer.tiers.occupied import remove_left_in_time
from protocol.errors import UnavailableError, first_line

log = logging.getLogger(__name__)

_CLOSE_S = 30.0


def retire_cluster(deadline_s: float | None) -> None:
    """Let in no new requests, and wait until none runs, or for `deadline_s` seconds.

    None stands for `limits.shutdown_s` of the configuration that the cluster was started with.
    """
    controller = find_controller()
    if controller is not None:
        try:
            if deadline_s is None:
                started, _ = ray.get(controller.configurations.remote(), timeout=RESTARTED_ANSWER_S)
                deadline_s = started.limits.shutdown_s
            ray.get(controller.retire.remote(deadline_s), timeout=deadline_s + RETIRE_ANSWER_S)
        except RayError as error:
            log.warning("requests are cut off: %s", first_line(error))


def remove_cluster(
    *, memory_tiers: bool = True, application: bool = True, keep: str | None = None, own: Any | None = None
) -> bool:
    """Remove whatever there is of Tandem on the Ray cluster that this process has joined. Return False if there was nothing.

    `memory_tiers`: there may be some. Without `application`, the routers are left to Serve. `keep` is the name of an actor of
    ours that stays: the one that calls this. `own` is the controller of the cluster that is meant. Once another one is there,
    nothing more is removed: whoever ended that cluster has done it.
    """
    controller = find_controller()
    if _is_another(controller, own):
        return False
    closing = None if controller is None else controller.close.remote()
    served = application and _remove_application()
    if closing is not None:
        try:
            ray.get(closing, timeout=_CLOSE_S)
        except (RayError, GetTimeoutError) as error:
            log.warning("the controller did not end its workers: %s", first_line(error))
    # The next cluster may have begun meanwhile, where `own` had ended before.
    if own is not None and _is_another(find_controller(), own):
        return served
    try:
        at_head(HEAD_RESOURCES, withdraw)
    except UnavailableError as error:
        log.warning("what HAProxy was told is left: %s", error.message)
    if own is not None and _is_another(find_controller(), own):
        return served
    swept = sweep(keep)
    if memory_tiers:
        _remove_memory_tiers()
    return served or swept


def _is_another(controller: Any | None, own: Any | None) -> bool:
    return own is not None and controller is not None and controller._actor_id != own._actor_id


def sweep(keep: str | None = None) -> bool:
    """Kill actors, but the one called `keep`, and remove placement groups, that carry Tandem's name.

    What entries have on their nodes goes first. Return False if there were no such actors and groups.
    """
    withdraw_entries()
    actors = [name for name in own_names() if name != keep]
    actors.sort(key=lambda name: name != CONTROLLER)  # first, for it would replace its workers
    for name in actors:
        handle = _actor(name)
        if handle is not None:
            ray.kill(handle)
    delete_records()
    groups = named_groups()
    for _, group in groups:
        remove_placement_group(group)  # one that was removed meanwhile stays so
    return bool(actors or groups)


def _remove_memory_tiers() -> None:
    """On every node: workers that are killed leave theirs. A node that does not answer keeps it until a worker starts there."""
    task = ray.remote(num_cpus=0, max_retries=0)(remove_left_in_time)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    removing = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes]
    ray.wait(removing, num_returns=len(removing), timeout=_CLOSE_S)


def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None  # it ended meanwhile


def _remove_application() -> bool:
    """Delete the application, and Serve itself when it has no other."""
    try:
        applications = serve.status().applications
        if APPLICATION in applications:
            remove_application()
        if applications.keys() <= {APPLICATION}:
            serve.shutdown()
    except RayActorError:
        return True  # Serve's controller ended meanwhile
    return APPLICATION in applications
