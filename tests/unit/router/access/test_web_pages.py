"""Which Host and Origin headers pass, on loopback and elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import HttpConfig
from protocol.errors import NotAllowedError
from router.access.web_pages import WebPageRules


def passes(http: HttpConfig, *hosts: str, origin: str | None = None, path: str = "/v1/models") -> bool:
    headers = [(b"host", host.encode()) for host in hosts]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    scope: Any = {"path": path, "headers": headers}
    try:
        WebPageRules(http).check(scope)
    except NotAllowedError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:8000", "LOCALHOST", "mine.test:9"]
)
def test_own_names_pass(host: str) -> None:
    assert passes(HttpConfig(allowed_hosts=["Mine.test"]), host)


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ("",),
        ("evil.test",),
        ("evil.test:8000",),
        ("localhost.evil.test",),
        ("127.0.0.1.evil.test",),
        ("mine.test.evil.test",),
        ("localhost", "evil.test"),
        ("localhost@evil.test",),
        ("[::2]",),
        ("[evil",),
        ("10.0.0.1",),
    ],
)
def test_other_names_are_refused_on_loopback(hosts: tuple[str, ...]) -> None:
    assert not passes(HttpConfig(allowed_hosts=["mine.test"]), *hosts)


def test_elsewhere_names_count_where_some_are_listed() -> None:
    assert passes(HttpConfig(host="0.0.0.0"), "any.test")
    listed = HttpConfig(host="192.0.2.1", allowed_hosts=["mine.test", "[2001:db8::1]"])
    assert [passes(listed, host) for host in ("mine.test", "[2001:db8::1]:80", "192.0.2.1", "localhost")] == [True] * 4
    assert not passes(listed, "any.test")


WATCHED = ("/live", "/ready", "/health", "/metrics")


def test_probes_and_prometheus_may_ask_for_an_address() -> None:
    """A kubelet and Prometheus send a pod's address as Host, which nobody can list before."""
    everywhere = HttpConfig(host="0.0.0.0", allowed_hosts=["llm.example.com"])
    for path in WATCHED:
        assert passes(everywhere, "10.1.2.3:8000", path=path), path
        assert not passes(everywhere, "10.1.2.3:8000", origin="http://evil.test", path=path), "pages still may not"
        assert not passes(HttpConfig(), "evil.test", path=path), "DNS rebinding: /metrics needs no key on loopback"
    for path in ("/v1/models", "/admin/status", "/", "/live/x", "//metrics"):
        assert not passes(everywhere, "10.1.2.3:8000", path=path), path


def test_pages_of_this_server_pass_and_others_when_listed() -> None:
    assert passes(HttpConfig(), "localhost:8000", origin="http://localhost:8000")
    assert passes(HttpConfig(host="0.0.0.0"), "api.test", origin="https://api.test"), "a proxy with TLS may be before it"
    for origin in ("http://localhost", "http://localhost:8001", "http://127.0.0.1:8000", "null", "", "http://evil.test"):
        assert not passes(HttpConfig(), "localhost:8000", origin=origin), origin
    listed = HttpConfig(allowed_origins=["HTTPS://chat.test", "app://notes"])
    assert passes(listed, "localhost", origin="https://chat.test")
    assert passes(listed, "localhost", origin="app://notes")
    assert not passes(listed, "localhost", origin="http://chat.test")


def test_no_other_origin_is_an_operator() -> None:
    listed = HttpConfig(allowed_origins=["https://chat.test"])
    assert not passes(listed, "localhost", origin="https://chat.test", path="/admin/drain")
    assert passes(listed, "localhost", origin="http://localhost", path="/admin/drain")


@pytest.mark.parametrize("name", ["", "a b", "*.test", "mine.test:80", "http://mine.test", "::1"])
def test_impossible_names_are_errors_of_the_configuration(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        HttpConfig(allowed_hosts=[name])


@pytest.mark.parametrize("origin", ["", "*", "chat.test", "https://chat.test/", "https://", "null", "https://*.test"])
def test_impossible_origins_are_errors_of_the_configuration(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        HttpConfig(allowed_origins=[origin])
