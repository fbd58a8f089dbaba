"""How many replicas of the router Ray Serve runs, while the cluster serves; and their removal.

A replica that Serve lets go ends like this (ray/serve/_private/replica.py, Ray 2.60):

    out of HAProxy's list ──► takes connections that are on their way ──► its streams end ──► ends itself
                              RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S  └─ `limits.shutdown_s` ─► is killed

A resumable stream that is cut off goes on at another router when its client comes back. Replicas that stay notice nothing:
another number is no new version of the deployment.

Serve is imported where it is used, for the controller needs it only when it scales.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import ray

from configs.schema import LimitsConfig
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

APPLICATION = "tandem"
DEPLOYMENT = "router"
_ANSWER_S = 10.0
_AGAIN_S = 1.0
_IDLE_END_S = 5.0
"""Seconds in which a replica without requests ends. Serve grants no fewer."""
_REMOVED_S = 60.0
_LOOK_S = 0.2


class RouterReplicas:
    """Tells Serve how many replicas of the router are wanted, again and again until it has heard."""

    def __init__(self) -> None:
        self._wanted = 0
        self._telling: asyncio.Task[None] | None = None

    def want(self, number: int) -> None:
        """Want this many replicas from now on; returns at once. Call it in the event loop."""
        self._wanted = number
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        told: int | None = None
        while told != self._wanted:
            number = self._wanted
            try:
                await asyncio.to_thread(_set_target, number)
                told = number
            except Exception:  # whatever keeps Serve from answering, it is asked again
                log.exception("Ray Serve does not know yet that %d routers are wanted", number)
                await asyncio.sleep(_AGAIN_S)


def drain_s(limits: LimitsConfig) -> float:
    """Return the seconds that a replica has to end, from when Serve lets it go."""
    return _reachable_s() + max(limits.shutdown_s, _IDLE_END_S)


def remove_application() -> None:
    """Have Serve remove the routers. Requests have had their time: who still has some then is killed."""
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    begun, killed = time.monotonic(), False
    while APPLICATION in serve.status().applications:
        passed_s = time.monotonic() - begun
        if passed_s > _REMOVED_S:
            log.warning("Ray Serve has not removed the routers within %g s", _REMOVED_S)
            return
        if not killed and passed_s > _reachable_s() + _IDLE_END_S:
            killed = True
            _kill_replicas()
        time.sleep(_LOOK_S)


def serve_id() -> str | None:
    """Return the id of Serve's controller, which it keeps when its process dies, or None if Serve does not run.

    Blocks for calls to Ray. Raises RayError, or ValueError, if they fail.
    """
    controller = _serve_controller()
    return None if controller is None else str(controller._actor_id.hex())


def application_is_gone(known_id: str | None) -> bool:
    """Return whether Serve has no such application any more, or has ended; then another Serve may run. `known_id`: of ours.

    Blocks for calls to Ray, and raises as `serve_id`. `serve.status` keeps the handle of a controller that has ended, and then
    knows nothing for ever.
    """
    controller = _serve_controller()
    if controller is None or controller._actor_id.hex() != known_id:
        return True
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=_ANSWER_S)
    return APPLICATION not in details["applications"]


def check_entries_everywhere() -> None:
    """Raise ConfigError unless Serve brings an entry to every node with a router. Whoever starts Serve first has the say.

    Blocks for calls to Ray, and raises RayError if they fail.
    """
    controller = _serve_controller()
    details = {} if controller is None else ray.get(controller.get_serve_instance_details.remote(), timeout=_ANSWER_S)
    if details.get("proxy_location") != "EveryNode":
        problem = (
            "entries on several nodes need a Serve with `proxy_location: EveryNode`, and the one that runs here has another"
        )
        raise ConfigError(problem, param="http.router_resources")


def _serve_controller() -> Any | None:
    """None if there is none for certain: that is asked of the list, since `get_actor` may mean that the GCS does not answer."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    if {"name": SERVE_CONTROLLER_NAME, "namespace": SERVE_NAMESPACE} not in ray.util.list_named_actors(all_namespaces=True):
        return None
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def _set_target(number: int) -> None:
    """Blocks. As Serve's REST API does it (POST .../applications/tandem/deployments/router/scale), which needs a dashboard."""
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(DEPLOYMENT, APPLICATION), number), timeout=_ANSWER_S)


def _kill_replicas() -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.constants import SERVE_NAMESPACE

    ours = DeploymentID(DEPLOYMENT, APPLICATION)
    actors = ray.util.list_named_actors(all_namespaces=True)
    for name in [actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE]:
        if ReplicaID.is_full_id_str(name) and ReplicaID.from_full_id_str(name).deployment_id == ours:
            with suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))


def _reachable_s() -> float:
    """Seconds that a replica still takes connections, as far as the environment of this process tells."""
    from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S

    return float(RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)
