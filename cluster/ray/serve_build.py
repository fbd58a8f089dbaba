"""What `serve deploy` names as import path, `cluster.ray.serve_build:build`: it starts a cluster and returns its routers.

The arguments are the keys of Tandem's configuration, nested as in a file or with dots between; `config` is the path of such a
file on the head node, before which they go. deploy/serve.yaml is an example. Keys that `tandem serve` takes from its
environment come from the head node's.

Serve runs `build` in a task of its own, on any node, whenever an application is deployed with other arguments. What it raises
is the message of `serve status`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel
from ray import serve

from cluster.commands.lib.config_flags import FLAGS
from cluster.gpu_shares import with_gpu_shares
from cluster.ray.actors import node_resources
from cluster.ray.deployment import find_or_make_deployment
from cluster.ray.errors import wait_for
from cluster.ray.front import HEAD_RESOURCES, at_head
from cluster.ray.serve_app import RouterArguments, router_application
from configs.loader import load_config
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, TandemError, UnavailableError

_ANSWER_S = 60.0
_FORMER_S = 120.0
"""How long a cluster whose application is gone may take to end."""
_LOOK_S = 0.5


def build(arguments: dict[str, Any]) -> serve.Application:
    """Start the cluster that the arguments describe, and return its routers, once every worker is ready.

    With the arguments of a cluster that runs, it is that one. Raises ConfigError for what the operator can mend, also if a
    cluster runs with other arguments. What was started is gone then.
    """
    asked = at_head(HEAD_RESOURCES, read, arguments)
    deployment, running = _deployment(asked)
    if running != asked:
        problem = "a Tandem cluster runs here with another configuration"
        raise ConfigError(f"{problem}: end it first with `serve shutdown`, or change it with `tandem rollout --config`")
    try:
        given: RouterArguments = _ask(deployment.start.remote(), None)  # which has deadlines of its own
    except TandemError:
        if not _ask(deployment.has_cluster.remote(), _ANSWER_S):
            ray.kill(deployment)  # what is mended is another configuration
        raise
    return router_application(given, HEAD_RESOURCES)


def _deployment(asked: ClusterConfig) -> tuple[Any, ClusterConfig]:
    """The actor of this Ray cluster, a new one if need be, and its configuration; after the end of one that ends.

    Raises UnavailableError if that takes too long.
    """
    deadline = time.monotonic() + _FORMER_S
    config = with_gpu_shares(asked, node_resources())
    while True:
        deployment = find_or_make_deployment(asked, config)
        try:
            running = _ask(deployment.asked.remote(), _ANSWER_S)
        except UnavailableError:
            running = None  # it has just ended
        if running is not None:
            return deployment, running
        if time.monotonic() > deadline:
            raise UnavailableError(f"the cluster that was here has not ended within {_FORMER_S:g} s")
        time.sleep(_LOOK_S)


def read(arguments: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration that the arguments describe, on the node where this runs. Raises ConfigError."""
    path = arguments.get("config")
    if not isinstance(path, str | None):
        raise ConfigError(f"config: should be the path of a file, not {path!r:.40}", param="config")
    settings = {key: value for key, value in arguments.items() if key != "config"}
    named = {each.keys[0]: os.environ[each.envvar] for each in FLAGS if each.envvar is not None and each.envvar in os.environ}
    return load_config(None if path is None else Path(path), named | dict(dotted(settings)))


def dotted(settings: Mapping[str, Any], model: type[BaseModel] = ClusterConfig, section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its whole key, such as `decode.workers`, down to where the configuration has sections."""
    for key, value in settings.items():
        kind = model.model_fields[key].annotation if key in model.model_fields else None
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from dotted(value, kind, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def _ask(reference: Any, deadline_s: float | None) -> Any:
    """Raises the TandemError that the actor raised, and UnavailableError if it is gone or late."""
    return wait_for(reference, deadline_s, "the cluster's actor on the head node is gone")
