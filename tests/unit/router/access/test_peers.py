"""Who sent a request: HAProxy is believed, nobody else is."""

from __future__ import annotations

from typing import Any

import pytest

from router.access.peers import Peer, PeerReader, peer_of

TOKEN = "5ecret"


def scope(client: str | None = "127.0.0.1", **headers: str) -> Any:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"state": {}, "client": None if client is None else (client, 4711), "headers": raw}


def test_haproxy_says_whose_a_request_is() -> None:
    asked = scope(x_tandem_front=TOKEN, x_forwarded_for="203.0.113.9")
    peer = PeerReader(TOKEN).read(asked)
    assert peer == peer_of(asked) == Peer("203.0.113.9", relayed=False)
    assert (peer.is_local, str(peer)) == (False, "203.0.113.9")
    assert PeerReader(TOKEN).read(scope(x_tandem_front=TOKEN, x_forwarded_for="::1")).is_local
    relayed = PeerReader(TOKEN).read(scope(x_tandem_front=TOKEN, x_forwarded_for="127.0.0.1", x_tandem_relayed="1"))
    assert (relayed.is_local, str(relayed)) == (False, "127.0.0.1 (a proxy)")


@pytest.mark.parametrize("proof", [{}, {"x_tandem_front": ""}, {"x_tandem_front": "5ecre"}, {"x_tandem_front": "\xff"}])
def test_whoever_comes_around_haproxy_is_unknown(proof: dict[str, str]) -> None:
    peer = PeerReader(TOKEN).read(scope(x_forwarded_for="127.0.0.1", **proof))
    assert (peer.address, peer.is_local, str(peer)) == (None, False, "unknown")


def test_without_haproxy_the_connection_tells_unless_a_proxy_has_sent_it() -> None:
    reader = PeerReader(None)
    assert reader.read(scope()).is_local
    assert not reader.read(scope("10.0.0.7")).is_local
    assert not reader.read(scope(None)).is_local
    assert not reader.read(scope(via="1.1 nginx")).is_local
    assert reader.read(scope(x_tandem_front=TOKEN, x_tandem_relayed="1")).is_local, "nobody says so here"
