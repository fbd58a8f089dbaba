"""Values of the section `http` that are right one by one and impossible together. Pure."""

from __future__ import annotations

from configs.addresses import WILDCARDS, is_loopback
from configs.schema import HttpConfig

_OF_WORKERS = frozenset({"CPU", "GPU", "memory"})
"""Resources that Ray counts by itself."""


def http_problems(http: HttpConfig) -> list[tuple[str, str]]:
    """Return what is wrong, as (key, sentence)."""
    found = _entry_problems(http) if http.router_resources else []
    if http.keys_file is not None and http.allow_anonymous:
        found.append(("http.allow_anonymous", "true makes no sense beside http.keys_file: one or the other"))
    if http.keys_file is None and not http.allow_anonymous and not is_loopback(http.host):
        problem = f"others reach {http.host}: name http.keys_file (see `tandem keys`), or set http.allow_anonymous to true"
        found.append(("http.host", problem))
    if (http.ssl_certfile is None) != (http.ssl_keyfile is None):
        missing = "http.ssl_certfile" if http.ssl_certfile is None else "http.ssl_keyfile"
        found.append((missing, "certificate and private key go together: name both"))
    if http.redis_url is not None and http.keys_file is None:
        found.append(("http.redis_url", "it keeps the rates of API keys: name http.keys_file too"))
    if http.max_router_replicas is not None and http.max_router_replicas < http.router_replicas:
        problem = f"{http.max_router_replicas} is less than http.router_replicas ({http.router_replicas})"
        found.append(("http.max_router_replicas", problem))
    if http.max_body_bytes_in_flight < http.max_body_bytes:
        problem = f"{http.max_body_bytes_in_flight} is less than one body, http.max_body_bytes ({http.max_body_bytes})"
        found.append(("http.max_body_bytes_in_flight", problem))
    return found


def _entry_problems(http: HttpConfig) -> list[tuple[str, str]]:
    """What is in the way of entries on several nodes."""
    found = []
    if counted := sorted(_OF_WORKERS & http.router_resources.keys()):
        problem = (
            f"{', '.join(counted)} can't choose the nodes of routers: name a resource of your own (`ray start --resources`)"
        )
        found.append(("http.router_resources", problem))
    if http.host not in WILDCARDS and not is_loopback(http.host):
        problem = (
            f"{http.host} is one machine's, and http.router_resources has entries on several nodes: let it be 0.0.0.0 or ::"
        )
        found.append(("http.host", problem))
    return found
