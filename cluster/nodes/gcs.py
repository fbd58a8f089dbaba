"""The nodes of a Ray cluster as its GCS knows them, and the one call that has Ray leave a node.

Nothing here joins the Ray cluster: a process that did, on a node that goes, would end with the node. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.ray.actors import PROCESS_PREFIX
from cluster.ray.session import check_reachable
from cluster.router_replicas import APPLICATION, DEPLOYMENT
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError, first_line

_ANSWER_S = 5.0
_SHORTEST_ID = 6
_PROCESS = re.compile(rf"{PROCESS_PREFIX}(worker-\d+|host-\w+)|SERVE_REPLICA::{APPLICATION}#{DEPLOYMENT}#(\w+)")
"""Names of the actors that a node has to be free of; of Serve's replicas, `ReplicaID.to_full_id_str`."""


@dataclass(frozen=True)
class DrainedNode:
    """A node that Ray drains: nothing new is placed there."""

    node_id: str
    address: str
    leaves_at: float | None
    """When it is gone, in seconds since 1970; None if nobody has said."""


@dataclass(frozen=True)
class RayNode:
    """A node that is, or was, part of a Ray cluster."""

    node_id: str
    address: str
    name: str
    """Host name of the node."""
    is_head: bool
    up: bool
    lost: bool = False
    """It ended, and had not been drained, or not to its end."""


class Gcs:
    """A client of a Ray cluster's GCS. Every method blocks, and raises UnavailableError if there is no answer in time."""

    def __init__(self, address: str) -> None:
        """`address` is the GCS's, host:port. Raises UnavailableError if there is no answer in time."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        with _answering():
            self._client: Any = GcsClient(address=address)

    def nodes(self) -> list[RayNode]:
        """Return all nodes, those that are gone too."""
        from ray.core.generated.common_pb2 import NodeDeathInfo  # type: ignore[attr-defined]
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

        with _answering():
            infos = self._client.get_all_node_info(timeout=_ANSWER_S).values()
        return [
            RayNode(
                info.node_id.hex(),
                info.node_manager_address,
                info.node_manager_hostname,
                is_head=info.is_head_node,
                up=info.state == GcsNodeInfo.ALIVE,
                lost=info.state != GcsNodeInfo.ALIVE and info.death_info.reason == NodeDeathInfo.UNEXPECTED_TERMINATION,
            )
            for info in infos
        ]

    def drained_nodes(self) -> list[DrainedNode]:
        """Return the nodes that are up and that Ray drains, but for the head node."""
        with _answering():
            deadlines: dict[str, int] = self._client.get_draining_nodes(timeout=_ANSWER_S)
        if not deadlines:
            return []
        up = {node.node_id: node for node in self.nodes() if node.up and not node.is_head}
        return [
            DrainedNode(node_id, up[node_id].address, deadline_ms / 1000 if deadline_ms else None)
            for node_id, deadline_ms in deadlines.items()
            if node_id in up
        ]

    def drain(self, node_id: str, reason: str, deadline_s: float) -> None:
        """Have Ray place nothing more on a node, which is gone in `deadline_s` seconds.

        Raises UnavailableError if Ray refuses.
        """
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

        leaves_at_ms = int((time.time() + deadline_s) * 1000)
        # The one reason for which Ray never refuses: a node that is not idle goes, too.
        preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        with _answering():
            accepted, problem = self._client.drain_node(node_id, preemption, reason, leaves_at_ms, timeout=_ANSWER_S)
        if not accepted:
            raise UnavailableError(f"Ray does not drain the node: {problem}")

    def present_on(self, node_id: str) -> list[str]:
        """Return the ids of the workers with processes on this node, and of routers; of paced workers, of their processes."""
        from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

        with _answering():
            actors = asyncio.run(self._actors())
        here = [actor for actor in actors if actor.state != ActorTableData.DEAD and actor.address.node_id.hex() == node_id]
        found = [match for actor in here if (match := _PROCESS.match(actor.name)) is not None]
        return sorted({match[1] or f"router {match[2]}" for match in found})

    async def _actors(self) -> list[Any]:
        return list((await self._client.async_get_all_actor_info(timeout=_ANSWER_S)).values())


def find_gcs(address: str) -> Gcs:
    """Return the GCS of the Ray cluster at `address` (host:port, or `auto` on one of its nodes).

    Raises ConfigError for what is no address, UnavailableError if nobody listens there.
    """
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if address != "auto":
        check_reachable(address)
    try:
        found = canonicalize_bootstrap_address_or_die(address)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {first_line(error)}", param="address") from None
    check_reachable(found)
    return Gcs(found)


def own_gcs() -> Gcs:
    """Return the GCS of the Ray cluster that this process belongs to."""
    import ray

    return Gcs(ray.get_runtime_context().gcs_address)


def chosen_node(nodes: Sequence[RayNode], wanted: str | None) -> RayNode:
    """Return the node that is up with this id (or its beginning), address or host's name; None means the one of this machine.

    Raises InvalidRequestError if that is none, several, or the head node.
    """
    up = [node for node in nodes if node.up]
    if wanted is None:
        found, what = [node for node in up if is_here(node.address)], "this machine"
    else:
        begins = len(wanted) >= _SHORTEST_ID
        found = [node for node in up if wanted in (node.address, node.name) or (begins and node.node_id.startswith(wanted))]
        what = repr(wanted)
    listed = ", ".join(f"{node.node_id} ({node.address})" for node in found or up)
    if not found:
        raise InvalidRequestError(f"no node of the Ray cluster is {what}; there are {listed}", param="node")
    if len(found) > 1:
        raise InvalidRequestError(f"several nodes of the Ray cluster are {what}; name one by its id: {listed}", param="node")
    if found[0].is_head:
        raise InvalidRequestError(
            "that is the head node, where the routers, the controller and Ray's GCS are: it can't be left. End the cluster "
            "with `tandem stop`, or see docs/handbook/failures.md on the head node",
            param="node",
        )
    return found[0]


def is_here(address: str) -> bool:
    """Return whether this IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


@contextmanager
def _answering() -> Iterator[None]:
    from ray.exceptions import RayError, RpcError

    try:
        yield
    except (RayError, RpcError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnavailableError(f"the GCS does not answer: {reason}") from None
