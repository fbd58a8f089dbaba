"""Lets each request in on its caller's behalf, or refuses it before its body is read.

The caller and the peer are in `scope["state"]`. With keys: Bearer authentication. Without: whoever comes over loopback to a
cluster that listens there alone, or everybody where the configuration says so. `cluster.ray.front` sees to it that the cluster
listens where the configuration says. Open to all are the pages and the other paths of `_OPEN`; /admin has a key of its own
(router/endpoints/operators.py). Nothing is open to web pages of other origins (router/access/web_pages.py).
"""

from __future__ import annotations

from pathlib import Path

from configs.addresses import is_loopback
from configs.schema import ClusterConfig
from protocol.errors import AuthenticationError, NotAllowedError, TandemError
from router.access.callers import Caller, anonymous
from router.access.keyring import Keyring
from router.access.peers import PeerReader, peer_of
from router.access.web_pages import WebPageRules
from router.api.envelope import AsgiApp, Receive, Scope, Send
from router.api.errors import error_response
from router.page.routes import PAGE_FILES

_OPEN = frozenset(("/health", "/live", "/ready", "/metrics", "/openapi.json", *PAGE_FILES))
_OPERATORS = "/admin/"
_CALLER = "caller"


class Authenticator:
    """Finds the caller of a request, by its key or by the peer's address."""

    def __init__(self, config: ClusterConfig) -> None:
        """Read the keys, if the configuration names a file of them. Raises ConfigError if they can't be read."""
        self._http = config.http
        self._anonymous = anonymous(config.tiers)
        keys_file = config.http.keys_file
        has_usage_log = config.telemetry.usage_log is not None
        self.keyring = None if keys_file is None else Keyring(Path(keys_file), config.tiers, has_usage_log=has_usage_log)
        """The keys; None if the configuration names no file of them."""

    def caller(self, scope: Scope) -> Caller:
        """Return the caller of the request with this ASGI scope.

        Raises AuthenticationError for a missing or wrong key, and NotAllowedError for a peer that may not come without a key.
        """
        if self.keyring is not None:
            return self.keyring.caller(_bearer(scope))
        if self._http.allow_anonymous or (is_loopback(self._http.host) and peer_of(scope).is_local):
            return self._anonymous
        raise NotAllowedError(
            "without http.keys_file or http.allow_anonymous only loopback addresses are served, not through another proxy"
        )

    def known_key_id(self, scope: Scope) -> str | None:
        """Return the id of the key that the request names, if there is such a key, good or not. Never what was sent instead."""
        if self.keyring is None:
            return None
        try:
            return self.keyring.known_id(_bearer(scope))
        except AuthenticationError:
            return None


class Gate:
    """ASGI middleware that notes each request's peer and caller in its scope, or refuses the request.

    It stands inside the Envelope.
    """

    def __init__(self, app: AsgiApp, authenticator: Authenticator, peers: PeerReader, web_pages: WebPageRules) -> None:
        self._app = app
        self._authenticator = authenticator
        self._peers = peers
        self._web_pages = web_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._peers.read(scope)
            try:
                self._web_pages.check(scope)
                if is_for_callers(scope["path"]):
                    scope["state"][_CALLER] = self._authenticator.caller(scope)
            except TandemError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_for_callers(path: str) -> bool:
    """Return whether a path is neither open to everybody nor for operators."""
    return (path.rstrip("/") or "/") not in _OPEN and not path.startswith(_OPERATORS)


def known_caller(scope: Scope) -> Caller | None:
    """Return the caller that the gate noted in the scope of a request; None if the path is open or for operators."""
    caller: Caller | None = scope["state"].get(_CALLER)
    return caller


def tenant_of(scope: Scope) -> str:
    """Return the tenant of a request, which has no name where there is no caller or where callers have no keys."""
    caller = known_caller(scope)
    return "" if caller is None else caller.tenant


def caller_of(scope: Scope) -> Caller:
    """Return the caller that the gate noted in the scope of a request."""
    caller = known_caller(scope)
    assert caller is not None
    return caller


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return str(given.strip())
    raise AuthenticationError("an API key is needed: send `Authorization: Bearer tk-...`")
