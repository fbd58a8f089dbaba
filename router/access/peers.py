"""Who sent a request, and whether that can be known. Pure.

HAProxy stands before every router, so the peer of each connection is HAProxy itself. It therefore replaces what a client says
of itself by what it sees, and proves with the token of this start of the cluster that it was HAProxy who said so:

    client ──► HAProxy: x-forwarded-for = the client's address, x-tandem-front = the token ──► router
    client ──────────────────────────────────────────────────────────────────────────────────► router: not believed

Where there is no HAProxy, Serve's own proxy hands on the peer's address by itself.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from configs.addresses import is_loopback
from router.api.envelope import Scope

FRONT_HEADER = b"x-tandem-front"
"""The header in which HAProxy proves itself."""
RELAYED_HEADER = b"x-tandem-relayed"
"""The header by which HAProxy says that a request had headers of another proxy."""
_ADDRESS_HEADER = b"x-forwarded-for"
_PROXY_HEADERS = frozenset((_ADDRESS_HEADER, b"forwarded", b"via", b"x-real-ip", b"x-forwarded-host", b"x-forwarded-proto"))
_PEER = "peer"


@dataclass(frozen=True)
class Peer:
    """The other end of the connection on which a request came."""

    address: str | None
    """Its IP address. None if the request came around HAProxy, so that nobody trustworthy says whose it is."""
    relayed: bool
    """Another proxy has sent the request on behalf of somebody else."""

    @property
    def is_local(self) -> bool:
        """The request was made on this machine, as far as can be known."""
        return self.address is not None and is_loopback(self.address) and not self.relayed

    def __str__(self) -> str:
        return (self.address or "unknown") + (" (a proxy)" if self.relayed else "")


class PeerReader:
    """Reads the peer of a request from its ASGI scope."""

    def __init__(self, front_token: str | None) -> None:
        """`front_token` is what HAProxy proves itself with. None means that no HAProxy stands before this router."""
        self._token = None if front_token is None else front_token.encode()

    def read(self, scope: Scope) -> Peer:
        """Return the peer, and note it in the scope for `peer_of`."""
        peer = self._direct(scope) if self._token is None else self._behind_front(scope, self._token)
        scope["state"][_PEER] = peer
        return peer

    def _direct(self, scope: Scope) -> Peer:
        client = scope["client"]
        relayed = any(name in _PROXY_HEADERS for name, _ in scope["headers"])
        return Peer(None if client is None else client[0], relayed)

    def _behind_front(self, scope: Scope, token: bytes) -> Peer:
        said = {name: value for name, value in scope["headers"] if name in (FRONT_HEADER, RELAYED_HEADER, _ADDRESS_HEADER)}
        if not hmac.compare_digest(said.get(FRONT_HEADER, b""), token):
            return Peer(None, relayed=False)
        return Peer(said.get(_ADDRESS_HEADER, b"").decode("latin-1"), RELAYED_HEADER in said)


def peer_of(scope: Scope) -> Peer:
    """Return the peer that the gate noted in the scope of a request."""
    peer = scope["state"][_PEER]
    assert isinstance(peer, Peer)
    return peer
