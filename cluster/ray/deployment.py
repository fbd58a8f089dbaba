"""A cluster that Ray Serve starts and ends: the actor that does for `serve deploy` what `tandem serve` does in its process.

    serve deploy ─► build (cluster.ray.serve_build) ─► Deployment.start ─► controller, workers ─► what the routers are made with
    serve shutdown, serve delete tandem ─► Serve lets the routers go ─► the application is gone ─► Deployment removes the rest

Serve says nothing to anybody when it removes an application, so the actor looks: once a second. The workers go when the routers
have, so requests that run have their `limits.shutdown_s`.

If this actor dies, Ray starts it again with the same arguments, and it looks on. If it dies while it starts the cluster, the
build fails, and says so in `serve status`; the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray

from cluster.checks import check_autoscale, check_keys, check_model, check_telemetry
from cluster.controller import find_controller
from cluster.memory import role_memory
from cluster.ray.actors import NAME_PREFIX, made_until_it_works, start_keeper
from cluster.ray.front import HEAD_RESOURCES, check_listener
from cluster.ray.parts import Parts, ask_controller
from cluster.ray.serve_app import RouterArguments
from cluster.router_replicas import APPLICATION, application_is_gone, serve_id
from cluster.teardown import remove_cluster, sweep
from configs.schema import ClusterConfig
from protocol.errors import UnavailableError
from telemetry.logging import setup_logging

log = logging.getLogger(__name__)

_NAME = "deployment"
ACTOR = NAME_PREFIX + _NAME
_LOOK_S = 1.0
_ABSENT_LOOKS = 2
"""Looks in a row that find no application, before it counts as removed."""


class Deployment:
    """The actor, on the head node of a Ray cluster; one for each."""

    async def __init__(self, asked: ClusterConfig, config: ClusterConfig, secret: bytes, known_id: str | None) -> None:  # type: ignore[misc]
        """`asked` is the configuration that was deployed, `config` the same with the shares of GPUs. `known_id` is that of the
        Serve that deploys it.
        """
        setup_logging(_NAME)
        self._asked, self._config, self._secret, self._known_id = asked, config, secret, known_id
        self._starting = asyncio.Lock()
        self._ends = False
        async with made_until_it_works():
            # What a former life has started is this one's.
            self._has_cluster = ray.get_runtime_context().was_current_actor_reconstructed and find_controller() is not None
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def asked(self) -> ClusterConfig | None:
        """Return the configuration that was deployed; None if the actor ends, since its application is gone."""
        another = self._ends or await asyncio.to_thread(serve_id) != self._known_id
        return None if another else self._asked

    async def has_cluster(self) -> bool:
        """Return whether there is a cluster that this actor has to remove one day."""
        return self._has_cluster

    async def start(self) -> RouterArguments:
        """Start the cluster, or go on with it if it is there, and return once every worker is ready.

        Raises ConfigError for whatever the operator can mend, UnavailableError if a worker is not ready in time. A cluster that
        this call has started is gone then. It goes on to its end if Serve cancels the build.
        """
        return await asyncio.shield(asyncio.create_task(self._start()))

    async def _start(self) -> RouterArguments:
        async with self._starting:
            if self._ends:
                raise UnavailableError("the application was removed")
            return await asyncio.to_thread(self._go_on if self._has_cluster else self._begin)

    def _go_on(self) -> RouterArguments:
        parts = Parts(self._config, self._secret, find_controller(), HEAD_RESOURCES)
        ask_controller(parts.begin_settling())
        return parts.arguments()

    def _begin(self) -> RouterArguments:
        config = self._config
        check_keys(config)
        check_telemetry(config)
        check_autoscale(config)
        check_listener(config.http.host, config.http.port)
        facts = check_model(config)
        if find_controller() is None:
            sweep(ACTOR)  # of a cluster whose controller died
        parts = Parts.start(config, self._secret, role_memory(config, facts), HEAD_RESOURCES, may_grow=True)
        self._has_cluster = True
        try:
            parts.prepare_front()
            settled = parts.begin_settling()
            arguments = parts.arguments()
            ask_controller(settled)
        except BaseException:
            self._remove()
            raise
        return arguments

    def _remove(self) -> None:
        """All but the routers, which Serve removes, and this actor."""
        remove_cluster(memory_tiers=self._config.kv_offloading.memory_gib is not None, application=False, keep=ACTOR)
        self._has_cluster = False

    async def _watch(self) -> None:
        """Look until the application is gone; then remove the cluster and end."""
        absent = 0
        while absent < _ABSENT_LOOKS:
            await asyncio.sleep(_LOOK_S)
            try:
                absent = absent + 1 if await asyncio.to_thread(application_is_gone, self._known_id) else 0
            except Exception as error:  # noqa: BLE001 (whatever keeps Ray from answering, nothing is known then)
                log.warning("Serve can't be asked: %s", type(error).__name__)
                absent = 0
        log.info("Serve has no application %s any more: its workers end", APPLICATION)
        self._ends = True
        async with self._starting:
            while self._has_cluster:
                try:
                    await asyncio.to_thread(self._remove)
                except Exception:
                    log.exception("the cluster is not removed yet")
                    await asyncio.sleep(_LOOK_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def find_or_make_deployment(asked: ClusterConfig, config: ClusterConfig) -> Any:
    """Return the handle of this Ray cluster's Deployment, made for this configuration if there is none."""
    return start_keeper(Deployment, _NAME, HEAD_RESOURCES, asked, config, os.urandom(32), serve_id())
