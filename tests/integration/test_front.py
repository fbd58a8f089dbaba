"""The entry of a cluster on loopback without keys, through the real HAProxy: who is believed to be local, and slow clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.integration.listening import router_port

pytestmark = pytest.mark.slow

CONFIG = """
http: {allowed_hosts: [tandem.test], allowed_origins: ["https://chat.test"]}
limits: {header_s: 2, body_s: 3, client_s: 3}
"""
OPEN = "/health"
GUARDED = ("/admin/status", "/v1/models")


@pytest.fixture(scope="module")
def front(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """1 prefill + 1 decode worker on loopback, without keys, with short deadlines for clients."""
    config = tmp_path_factory.mktemp("front") / "cluster.yaml"
    config.write_text(CONFIG)
    served = serve("--dtype", "float32", "--config", str(config))
    served.wait_ready()
    return served


def statuses(url: str, headers: dict[str, str]) -> list[int]:
    return [httpx.get(url + path, headers=headers).status_code for path in GUARDED]


def test_what_another_proxy_hands_on_does_not_count_as_local(front: Any) -> None:
    assert statuses(front.url, {}) == [200, 200]
    for header in ("x-forwarded-for", "forwarded", "x-real-ip", "via"):
        assert statuses(front.url, {header: "127.0.0.1"}) == [403, 403], header


def test_only_haproxy_is_believed_at_a_routers_own_port(front: Any) -> None:
    direct = f"http://127.0.0.1:{router_port(front.processes())}"
    forged = {"x-forwarded-for": "127.0.0.1", "x-tandem-front": "0" * 64}
    assert [statuses(direct, headers) for headers in ({}, forged)] == [[403, 403]] * 2
    assert statuses(front.url, {"x-tandem-front": "0" * 64}) == [200, 200], "HAProxy puts its own in the place of a client's"
    assert httpx.get(direct + OPEN).status_code == 200


def test_a_name_that_was_pointed_here_is_refused(front: Any) -> None:
    """DNS rebinding: a page's own name leads to 127.0.0.1, and its requests have the same origin."""
    for path in (*GUARDED, OPEN, "/metrics", "/"):
        answer = httpx.get(front.url + path, headers={"host": f"evil.test:{front.port}"})
        assert (answer.status_code, "http.allowed_hosts" in answer.text) == (403, True), path
    for host in ("localhost", "127.0.0.1", "[::1]", "tandem.test", "TANDEM.test:80"):
        assert statuses(front.url, {"host": host}) == [200, 200], host


def test_pages_of_other_origins_are_refused_unless_they_are_listed(front: Any) -> None:
    body = {"model": "smollm2", "prompt": "a", "max_tokens": 1}
    own = {"origin": front.url}
    assert httpx.post(f"{front.url}/v1/completions", json=body, headers=own).status_code == 200, "the chat page"
    for origin in ("https://evil.test", "null", f"http://localhost:{front.port + 1}"):
        refused = httpx.post(f"{front.url}/v1/completions", json=body, headers={"origin": origin})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "origin")
        assert "access-control-allow-origin" not in refused.headers
    listed = httpx.post(f"{front.url}/v1/completions", json=body, headers={"origin": "https://chat.test"})
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, "https://chat.test")
    assert statuses(front.url, {"origin": "https://chat.test"}) == [403, 200], "no other origin is an operator"


def test_preflights_are_answered_for_listed_origins_alone(front: Any) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = f"{front.url}/v1/chat/completions"
    allowed = httpx.options(url, headers=asked | {"origin": "https://chat.test"})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.test")
    assert allowed.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    refused = httpx.options(url, headers=asked | {"origin": "https://evil.test"})
    assert refused.status_code >= 400
    assert "access-control-allow-origin" not in refused.headers
