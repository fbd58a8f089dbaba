"""Keeps web pages away that have no business here: the browser of somebody on this machine would carry their requests in.

A page reaches a server that only this machine reaches in two ways. It may ask for 127.0.0.1 from an origin of its own; then the
Origin header tells. Or it may have its own name point to 127.0.0.1 (DNS rebinding); then the Host header has that name. Pure.
"""

from __future__ import annotations

from configs.addresses import is_loopback
from configs.schema import HttpConfig
from protocol.errors import NotAllowedError
from router.api.envelope import Scope

_WATCHED = frozenset(("/live", "/ready", "/health", "/metrics"))
"""Paths that a kubelet and Prometheus ask a pod for, by its address.

Where others than this machine may come, /metrics needs a key, and the others tell only whether requests get through.
"""


class WebPageRules:
    """Which names this server goes by, and which web pages may use it."""

    def __init__(self, http: HttpConfig) -> None:
        self._hosts = frozenset(http.allowed_hosts)
        self._on_loopback = is_loopback(http.host)
        self._own_name = http.host.lower()
        self._origins = frozenset(http.allowed_origins)

    def check(self, scope: Scope) -> None:
        """Raise NotAllowedError for a Host that is not ours, and for a page of another origin that is not allowed.

        No page of another origin may use /admin. Unless the cluster listens on loopback, probes and metrics take any Host.
        """
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if self._depends_on_host(scope["path"]) and not (hosts and all(map(self._is_ours, hosts))):
            raise NotAllowedError(
                f"this server does not go by the name {', '.join(hosts)!r:.100}; http.allowed_hosts lists more names",
                param="host",
            )
        for origin in origins:
            allowed = origin in self._origins and not scope["path"].startswith("/admin")
            if not allowed and origin.partition("://")[2] not in hosts:
                raise NotAllowedError(
                    f"web pages of {origin!r:.100} may not use this server; http.allowed_origins lists those that may",
                    param="origin",
                )

    def _depends_on_host(self, path: str) -> bool:
        return self._on_loopback or (bool(self._hosts) and path not in _WATCHED)

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host)
        return is_loopback(name.strip("[]")) or name in self._hosts or name.strip("[]") == self._own_name


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for each, value in scope["headers"] if each == name]


def _without_port(host: str) -> str:
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
