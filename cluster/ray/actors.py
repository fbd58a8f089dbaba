"""The processes of workers as Ray actors: detached, known by their names, and without a restart policy of Ray's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from cluster.ray.placement import HEAD_RESOURCE, Resources
from protocol.errors import UnavailableError, first_line

log = logging.getLogger(__name__)

NAMESPACE = "tandem"
NAME_PREFIX = "tandem-"
"""Prefix of the name of every actor and placement group that belongs to a cluster."""
PROCESS_PREFIX = NAME_PREFIX + "process-"
"""Prefix of the names of the actors that a launcher makes."""
STREAM_KEEPER = "streams"
"""Name of the keeper of resumable streams, the one that is off the head node where there is another."""

_GCS_S = 60.0
"""Seconds for which the GCS may be silent, as when it starts again, until that is an error."""
_ASK_AGAIN_S = 0.5
AGAIN_S = 10.0
"""Seconds before Ray gets to make an actor once more that could not be made after a restart."""


@dataclass(frozen=True)
class NamedActor:
    """A Ray actor that is a worker or one of its ranks, with its name."""

    name: str
    handle: Any


def node_resources() -> list[Resources]:
    """Return the total resources of each node that is up and stays: nothing is placed on one that Ray drains."""
    return [node["Resources"] for node in _staying_nodes()]


def own_cpus() -> float:
    """Return the number of processors that Ray counts on this node. Blocks for a call to Ray."""
    own = ray.get_runtime_context().get_node_id()
    return next((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["NodeID"] == own), 0.0)


def own_job() -> str:
    """Return the id under which this process has joined Ray."""
    job_id: str = ray.get_runtime_context().get_job_id()
    return job_id


def job_has_ended(job_id: str) -> bool:
    """Return whether the process that joined Ray under this id is gone, as far as the GCS knows. Blocks for a call to Ray."""
    return all(job["IsDead"] for job in ray._private.state.state.job_table() if job["JobID"] == job_id)


def nodes_of_groups() -> dict[str, str]:
    """Return the id of the node of every placement group that is on one node, by the group's id. Blocks for a call to Ray."""
    groups = {group: set(entry["bundles_to_node_id"].values()) for group, entry in placement_group_table().items()}
    return {group: next(iter(nodes)) for group, nodes in groups.items() if len(nodes) == 1}


def node_of_actor(handle: Any) -> str | None:
    """Return the id of the node where an actor is, or None if it is nowhere. Blocks for a call to Ray."""
    found = ray._private.state.state.actor_table(handle._actor_id.hex())
    return found["Address"]["NodeID"] or None if found else None


def worker_node() -> str | None:
    """Return the id of a node that is up, stays and is not the head node, or None if there is none."""
    return min((node["NodeID"] for node in _staying_nodes() if HEAD_RESOURCE not in node["Resources"]), default=None)


def is_head(node_id: str) -> bool:
    """Return whether this is the head node. Blocks for a call to Ray."""
    return any(node["NodeID"] == node_id and HEAD_RESOURCE in node["Resources"] for node in ray.nodes())


def _staying_nodes() -> list[dict[str, Any]]:
    leaving = ray._private.state.state.get_draining_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]


def take_up_actors(kept: Collection[str], worker_ids: Collection[str]) -> dict[str, PlacementGroup]:
    """Return the groups of these workers. Ends every other one, and every process but those that are kept. Blocks."""
    for stray in find_actors([name for name in own_names() if name.startswith(PROCESS_PREFIX) and name not in kept]):
        ray.kill(stray.handle)
    groups = {}
    for name, group in named_groups():
        worker_id = name.removeprefix(NAME_PREFIX)
        if worker_id in worker_ids:
            groups[worker_id] = group
        else:
            remove_placement_group(group)
    return groups


def named_groups() -> list[tuple[str, PlacementGroup]]:
    """Return the placement groups that carry Tandem's name, each with its name. Blocks for a call to Ray.

    They are of all namespaces. Ray looks a name up in the caller's alone, and who starts a cluster may have another one.
    """
    table = placement_group_table()
    present = [(entry["name"], id_hex) for id_hex, entry in table.items() if entry["state"] != "REMOVED"]
    return [(name, _group(id_hex)) for name, id_hex in present if name.startswith(NAME_PREFIX)]


def _group(id_hex: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID.from_hex(id_hex))


def own_names() -> list[str]:
    """Return the names of all actors of the cluster. Blocks for a call to Ray."""
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]


def find_actor(name: str) -> Any | None:
    """Return the handle of the cluster's actor of this name, or None if there is none for certain. Blocks for calls to Ray.

    It may ask again for a minute. Raises UnavailableError if the GCS does not answer by then.
    """
    until = time.monotonic() + _GCS_S
    while True:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:  # there is none, or the GCS does not answer
            problem = first_line(error)
        try:
            if name not in own_names():
                return None
        except RayError as error:
            problem = first_line(error)
        if time.monotonic() > until:
            raise UnavailableError(f"Ray does not say whether {name} is there: {problem}")
        time.sleep(_ASK_AGAIN_S)


def find_actors(names: Sequence[str]) -> list[NamedActor]:
    """Return those of them that there are. Blocks for calls to Ray. Raises UnavailableError if the GCS does not answer."""
    found = [(name, find_actor(name)) for name in names]
    return [NamedActor(name, handle) for name, handle in found if handle is not None]


def start_keeper(kind: type, name: str, resources: dict[str, float], *args: Any, **placement: Any) -> Any:
    """Return the handle of the cluster's actor of this name, which is made with these arguments if there is none yet.

    It outlives whoever started it, and Ray starts it again when its process dies.
    """
    options: dict[str, Any] = {
        "name": NAME_PREFIX + name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "resources": resources,
        "max_restarts": -1,
        **placement,
    }
    return _remote_class(kind).options(**options).remote(*args)


def move_stream_keeper(nodes: Collection[str]) -> None:
    """Have Ray start the keeper of resumable streams anew, elsewhere, if it is on one of these nodes. What it kept is lost.

    Blocks for calls to Ray.
    """
    if nodes:
        for keeper in find_actors([NAME_PREFIX + STREAM_KEEPER]):
            if node_of_actor(keeper.handle) in nodes:
                ray.kill(keeper.handle, no_restart=False)


@contextlib.asynccontextmanager
async def made_until_it_works() -> AsyncIterator[None]:
    """What an actor does here belongs to its constructor. If it raises after a restart, its process ends a while later.

    For Ray starts an actor again whose process ended, and never one whose constructor has raised. At the first start it is
    raised: whoever starts the actor is told.
    """
    try:
        yield
    except Exception:
        if not await asyncio.to_thread(_may_be_restarted):
            raise
        log.exception("it could not be made: its process ends in %g s, and Ray starts another one", AGAIN_S)
        await asyncio.sleep(AGAIN_S)
        os._exit(1)


def _may_be_restarted() -> bool:
    """Whether Ray has started this process's actor again, as far as anybody knows. Blocks for a call to Ray."""
    try:
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
    except Exception:  # noqa: BLE001 (whatever ails Ray: another try does no harm)
        return True


def new_actor(process_class: type, name: str, bundle: Resources, **placement: Any) -> NamedActor:
    """Make an actor of this class that reserves the bundle. Blocks for a call to Ray, not until the actor is placed."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {named[resource]: amount for resource, amount in bundle.items() if resource in named}
    options["resources"] = {resource: amount for resource, amount in bundle.items() if resource not in named}
    actor_class = _remote_class(process_class).options(
        name=name, namespace=NAMESPACE, lifetime="detached", **options, **placement
    )
    return NamedActor(name, actor_class.remote())


@functools.cache
def _remote_class(kind: type) -> Any:
    """One for all actors of this class: Ray sends each new one to the GCS, and keeps it there and here."""
    return ray.remote(kind)
