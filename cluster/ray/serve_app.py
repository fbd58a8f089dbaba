"""The router as a Ray Serve application: one deployment, whose replicas are the cluster's HTTP entry.

HAProxy (or Serve's own proxy where there is none) spreads connections over the replicas. Serve starts, replaces and counts
them; it never queues for them: admission is the router's own (limits.max_waiting_requests), so Serve's limit is out of reach.
A replica's life: resolve the model, build and start its Router, serve, close the Router when Serve ends it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from cluster.controller import RayControllerClient
from cluster.ray.front import LOOPBACK, Front, counts_folder, front_at_head, restore
from cluster.ray.keepers.audit import RayAuditStore
from cluster.ray.keepers.rates import rate_store
from cluster.ray.keepers.streams import RayRecordStore
from cluster.router_replicas import APPLICATION, DEPLOYMENT, drain_s
from configs.models import resolve_for
from configs.schema import ClusterConfig, HttpConfig
from protocol.errors import ConfigError, UnavailableError
from router.access.audit_trail import AuditQueue
from router.access.meter import Meter
from router.app import create_app
from router.resume.recorder import Recorder
from router.service import Router
from telemetry.counts_folder import CountsFolder
from telemetry.logging import setup_logging

if TYPE_CHECKING:
    from router.access.usage.noting import UsageNotes

_NEVER_REACHED = 100_000
"""Requests in one replica; above what HAProxy lets through (RAY_SERVE_HAPROXY_MAXCONN)."""
_OPEN_REQUESTS = 64
"""Open requests per router to which Serve's autoscaling leads.

A router computes for 114 µs per token (benchmarks/results/overhead_avx512_bf16.md), in one event loop. With 64 streams of 100
tokens/s each, as GPUs make them, that is 0.73 of a core: beyond that, streams begin to wait for each other.
"""
_MORE_AFTER_S = 10.0
_FEWER_AFTER_S = 600.0
"""Seconds. A router that goes cuts off streams that last longer than `limits.shutdown_s`, so it goes rarely."""
_LOOK_S = 0.1
"""How often a start asks Serve whether the routers are there."""
_SETTLE_S = 5.0
"""Seconds in which a replica gets to know the workers that are there, before it is asked anything."""
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""Environment of a replica.

glibc gives each thread memory of its own otherwise, and each keeps what it once needed: a router, whose requests pass
through many threads, then grows for thousands of them (`benchmarks/cut_streams.py`). And after the first large body it keeps
the memory of the next ones, unless the thresholds are fixed: then a MiB and more goes back at once.
"""


@dataclass(frozen=True)
class RouterArguments:
    """What every replica of the router needs to know of its cluster."""

    config: ClusterConfig
    secret: bytes
    controller: Any
    rate_keeper: Any | None
    stream_keeper: Any
    audit_keeper: Any | None
    usage_keeper: Any | None
    front: Front | None
    """None means that there is no HAProxy before the routers."""


@serve.ingress()
class RouterReplica:
    """One replica of the router in Ray Serve. Serve builds the ASGI app after the constructor has returned."""

    async def __init__(self, given: RouterArguments) -> None:  # type: ignore[misc]  # Serve awaits it
        setup_logging("router")
        if (name := serve.get_replica_context().app_name) != APPLICATION:
            raise ConfigError(f"the application has to be called {APPLICATION}, not {name}")
        model = await asyncio.to_thread(resolve_for, given.config)
        node, elsewhere = "", None
        if given.config.http.router_resources:
            from cluster.ray.keepers.entries import enter

            node, elsewhere = await enter(given.config, given.front)
        elif given.front is not None:
            await asyncio.to_thread(restore, given.config, front_at_head(given.front))
        counts = CountsFolder(counts_folder(), node)
        self._router = Router(given.config, model, given.secret, RayControllerClient(given.controller), counts, elsewhere)
        self._meter = Meter(rate_store(given.config, given.rate_keeper))
        self._recorder = Recorder(RayRecordStore(given.stream_keeper), given.config.resumable.retention_s)
        self._front_token = None if given.front is None else given.front.token
        self._audit = None if given.audit_keeper is None else AuditQueue(RayAuditStore(given.audit_keeper))
        if self._audit is not None:
            self._audit.start()
        self._usage: UsageNotes | None = None
        if given.usage_keeper is not None:
            from cluster.ray.usage.notes import start_usage_notes

            self._usage = start_usage_notes(self._router, given.usage_keeper)
        await self._router.start()
        await self._router.settle(_SETTLE_S)
        counts.note_ready()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._router,
            self._meter,
            self._recorder,
            self._audit,
            self._usage,
            echo_request_id=False,
            front_token=self._front_token,
        )

    async def __del__(self) -> None:
        await self._router.close()
        await self._meter.close()
        await self._recorder.close()
        if self._usage is not None:
            await self._usage.close()
        if self._audit is not None:
            await self._audit.close()


def start_http(http: HttpConfig, *, has_front: bool) -> None:
    """Start Serve's controller and its entry at http.host and http.port. What runs already stays.

    The entry is on the head node and, if there are `http.router_resources`, on every node to which they bring a router.

    Where the entry is a HAProxy, `front.prepare` has told it http.host, and only the routers behind it listen where Serve says:
    on loopback, which is how HAProxy reaches them. Raises UnavailableError if the entry can't start, for instance because
    somebody has just taken its port.
    """
    try:
        host = LOOPBACK if has_front else http.host
        location = "EveryNode" if http.router_resources else "HeadOnly"
        serve.start(proxy_location=location, http_options={"host": host, "port": http.port})
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "[ALERT]" in line), lines[-1])
        raise UnavailableError(f"the HTTP entry did not start: {reason}") from None


def size_of_deployment(http: HttpConfig) -> dict[str, Any]:
    """Return how many replicas Serve is to run: a number that `RouterReplicas` changes, or bounds of Serve's autoscaling."""
    if http.max_router_replicas is None:
        return {"num_replicas": http.router_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": http.router_replicas,
            "max_replicas": http.max_router_replicas,
            "target_ongoing_requests": _OPEN_REQUESTS,
            "upscale_delay_s": _MORE_AFTER_S,
            "downscale_delay_s": _FEWER_AFTER_S,
        }
    }


def router_application(given: RouterArguments, head_resources: dict[str, float]) -> serve.Application:
    """Return the router as an application that Serve can run. Without `http.router_resources`, `head_resources` place it."""
    resources = given.config.http.router_resources or head_resources
    deployment: Any = serve.deployment(
        name=DEPLOYMENT,
        max_ongoing_requests=_NEVER_REACHED,
        ray_actor_options={"num_cpus": 0, "resources": resources, "runtime_env": {"env_vars": _ENVIRONMENT}},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=drain_s(given.config.limits),
        **size_of_deployment(given.config.http),
    )
    application: serve.Application = deployment(RouterReplica).bind(given)
    return application


def deploy_router(given: RouterArguments, head_resources: dict[str, float]) -> None:
    """Deploy the router and wait until every replica serves. Raises UnavailableError if one can't."""
    by_command = given.config.http.max_router_replicas is None
    application = router_application(given, head_resources)
    target = serve.RunTarget(application, name=APPLICATION, route_prefix="/", external_scaler_enabled=by_command)
    try:
        # Serve's own wait looks once a second.
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        while True:
            found = serve.status().applications.get(APPLICATION)
            if found is None:
                raise RuntimeError("its application was removed meanwhile")
            if found.status == ApplicationStatus.RUNNING:
                return
            if found.status == ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError(f"its application failed: {found.message}")
            time.sleep(_LOOK_S)
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise UnavailableError(f"the router did not start: {reason}") from None
