"""What is found out before any process of a cluster is started: whether its model, keys, logs and port can be used."""

from __future__ import annotations

from pathlib import Path

import redis

from cluster.ray.front import check_certificate
from cluster.ray.session import check_port_free
from configs.facts import ModelFacts
from configs.loader import served_context
from configs.models import check_draft, resolve_for
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, UnavailableError
from router.access.keyring import check_key_file
from telemetry.audit_file import AuditFile
from telemetry.spans import check_installed

_REDIS_S = 5.0


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
    if config.http.router_resources:
        problem = "entries on several nodes need a Ray cluster of several nodes: join one with --address"
        raise ConfigError(problem, param="http.router_resources")
    check_port_free(config.http.host, config.http.port)
    check_certificate(config.http)
