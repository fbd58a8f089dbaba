"""Bring a whole cluster up and take it down again: what `tandem serve` does between its flags and Ctrl-C.

    check keys, model, port ─► Ray ─► controller ─► pools start ──────────────► settled ─► reported ─► followed
                                         └────────► Serve, HAProxy, routers ─────┘                        │
                                                                Ctrl-C, SIGTERM or a failure ─► down ◄────┘

Everything that can be found wrong before a process is started is found there. A failure at any step, and the end, leave
nothing behind: a local Ray instance ends with all its processes; in a Ray cluster that was joined, the workers, the
controller and the Serve application are removed one by one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import redis

from cluster.gpu_shares import with_gpu_shares
from cluster.memory import role_memory
from cluster.open_requests import RETIRE_ANSWER_S
from cluster.ray.front import HEAD_RESOURCES, check_certificate
from cluster.ray.placement import unplaceable
from cluster.ray.session import check_port_free, joined_ray, local_ray
from configs.facts import ModelFacts
from configs.loader import served_context
from configs.models import check_draft, resolve_for
from configs.schema import ClusterConfig
from kv_transfer.tiers.occupied import remove_left_in_time
from protocol.cluster_view import ClusterView
from protocol.errors import ConfigError, UnavailableError
from router.access.keyring import check_key_file
from telemetry.audit_file import AuditFile
from telemetry.spans import check_installed

Report = Callable[[str], None]
"""A function that is told what is being done, in words for people."""

_HEALTH_S = 30.0
_HEALTH_RETRY_S = 0.1
_REDIS_S = 5.0


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
        self._controller = controller
        self.config = config

    def retire(self, deadline_s: float) -> int:
        """Let in no new requests, and wait until none runs, or for `deadline_s` seconds. Return how many still run.

        Raises UnavailableError if the controller is gone.
        """
        from cluster.ray.parts import ask_controller

        return int(ask_controller(self._controller.retire.remote(deadline_s), deadline_s + RETIRE_ANSWER_S))

    def watch(self, known_version: int) -> ClusterView:
        """Return the view when it is a new one, or after 10 s. Raises UnavailableError if the controller is gone."""
        from cluster.ray.parts import ask_controller

        return cast(ClusterView, ask_controller(self._controller.watch.remote(known_version)))


def check_model(config: ClusterConfig) -> ModelFacts:
    """Return the model's facts, after fetching the model if need be.

    Raises ConfigError if the model can't be served at all, or not with this configuration; UnavailableError if it can't be
    fetched now.
    """
    model = resolve_for(config)
    served_context(config, model.facts)
    check_draft(config, model)
    return model.facts


def check_keys(config: ClusterConfig) -> None:
    """Raise ConfigError if the routers could not read the API keys, UnavailableError if nobody would keep their rates now."""
    http = config.http
    if http.keys_file is not None:
        check_key_file(Path(http.keys_file), config.tiers, has_usage_log=config.telemetry.usage_log is not None)
    if http.redis_url is not None:
        try:
            with redis.Redis.from_url(http.redis_url, socket_timeout=_REDIS_S, socket_connect_timeout=_REDIS_S) as client:
                client.ping()
        except (redis.RedisError, ValueError) as error:
            refused = isinstance(error, (redis.AuthenticationError, redis.exceptions.AuthorizationError))
            away = isinstance(error, (redis.ConnectionError, redis.TimeoutError)) and not refused
            problem = f"http.redis_url: no Redis answers there: {error}"
            raise (UnavailableError if away else ConfigError)(problem, param="http.redis_url") from None


def check_telemetry(config: ClusterConfig) -> None:
    """Raise ConfigError if the routers could not send spans, if a log could not be written, or if Kafka could not get it."""
    if config.telemetry.audit_log is not None:
        AuditFile(Path(config.telemetry.audit_log)).check()
    if config.telemetry.usage_log is not None:
        from cluster.ray.usage.settings import check_usage

        check_usage(config.telemetry)
    if config.telemetry.otlp_endpoint is not None:
        check_installed()


def check_autoscale(config: ClusterConfig) -> None:
    """Raise ConfigError if the controller could not forecast."""
    if config.autoscale.wanted:
        from autoscaler.forecast import check_installed as check_forecasting

        check_forecasting()


def check_own_http(config: ClusterConfig) -> None:
    """Raise ConfigError if a cluster of this machine could not listen, or not with its certificate."""
    check_port_free(config.http.host, config.http.port)
    check_certificate(config.http)


@contextmanager
def running_cluster(config: ClusterConfig, facts: ModelFacts, address: str | None, report: Report) -> Iterator[RunningCluster]:
    """Start everything, yield once every worker is ready and HTTP answers, then take it down.

    `facts` are the model's, which has been checked.

    `address` is a Ray cluster to join, whose GPUs workers share; None starts a Ray instance of our own. Raises ConfigError for
    whatever the operator can mend, UnavailableError when nobody answers at `address` or the cluster does not get ready in time.
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

            sharing = with_gpu_shares(config, node_resources())
            with _pools_and_http(sharing, facts, _JOINED, report) as cluster:
                yield cluster


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
    parts = Parts.start(config, os.urandom(32), memory, place.head_resources, may_grow=place.may_grow)
    try:
        parts.prepare_front()
        settled = parts.begin_settling()
        report("workers and router")
        start_http(config.http, has_front=parts.has_front)
        deploy_router(parts.arguments(), place.head_resources)
        report("workers")
        ask_controller(settled)
        report("HTTP")
        _wait_healthy(config)
        yield RunningCluster(parts.controller, config)
    finally:
        if not place.ends_with_us:
            remove_cluster(memory_tiers=config.kv_offloading.memory_gib is not None, own=parts.controller)


def _wait_healthy(config: ClusterConfig) -> None:
    """Until /health is 200 through the front door. Raises UnavailableError with the last reason against it."""
    host = "127.0.0.1" if config.http.host in ("0.0.0.0", "::") else config.http.host
    url = f"{config.http.scheme}://{f'[{host}]' if ':' in host else host}:{config.http.port}/health"
    deadline = time.monotonic() + _HEALTH_S
    # The certificate is for the name that clients use. Nothing secret is said here.
    with httpx.Client(timeout=_HEALTH_S, trust_env=False, verify=False) as client:
        while True:
            try:
                answer = client.get(url)
                reason = f"{answer.status_code} {answer.text}"
                if answer.status_code == httpx.codes.OK:
                    return
            except httpx.TransportError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise UnavailableError(f"{url} is not healthy after {_HEALTH_S:g} s: {reason}")
            # HAProxy learns of a replica by its own checks and tells nobody, so asking again is the only way to know.
            time.sleep(_HEALTH_RETRY_S)
