"""The entry of a cluster on loopback without keys, through the real HAProxy: who is believed to be local, and slow clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from router.api.unread_bodies import DROP_S
from tests.integration.listening import router_port

pytestmark = pytest.mark.slow

CONFIG = """
http: {allowed_hosts: [tandem.test], allowed_origins: ["https://chat.test"]}
limits: {header_s: 2, body_s: 3, client_s: 3}
"""
HEADER_S, BODY_S, CLIENT_S = 2.0, 3.0, 3.0
LATE_S = 5.0
"""Seconds that a busy machine may take beyond a deadline."""
OPEN = "/health"
GUARDED = ("/admin/status", "/v1/models")


@pytest.fixture(scope="module")
def front(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """1 prefill + 1 decode worker on loopback, without keys, with short deadlines for clients."""
    config = tmp_path_factory.mktemp("front") / "cluster.yaml"
    config.write_text(CONFIG)
    served = serve("--config", str(config))
    served.wait_ready()
    return served


def statuses(url: str, headers: dict[str, str]) -> list[int]:
    return [httpx.get(url + path, headers=headers, timeout=60).status_code for path in GUARDED]


def test_what_another_proxy_hands_on_does_not_count_as_local(front: Any) -> None:
    assert statuses(front.url, {}) == [200, 200]
    for header in ("x-forwarded-for", "forwarded", "x-real-ip", "via"):
        assert statuses(front.url, {header: "127.0.0.1"}) == [403, 403], header


def test_only_haproxy_is_believed_at_a_routers_own_port(front: Any) -> None:
    direct = f"http://127.0.0.1:{router_port(front.processes())}"
    forged = {"x-forwarded-for": "127.0.0.1", "x-tandem-front": "0" * 64}
    assert [statuses(direct, headers) for headers in ({}, forged)] == [[403, 403]] * 2
    assert statuses(front.url, {"x-tandem-front": "0" * 64}) == [200, 200], "HAProxy puts its own in the place of a client's"
    assert httpx.get(direct + OPEN, timeout=60).status_code == 200


def test_a_name_that_was_pointed_here_is_refused(front: Any) -> None:
    """DNS rebinding: a page's own name leads to 127.0.0.1, and its requests have the same origin."""
    for path in (*GUARDED, OPEN, "/metrics", "/"):
        answer = httpx.get(front.url + path, headers={"host": f"evil.test:{front.port}"}, timeout=60)
        assert (answer.status_code, "http.allowed_hosts" in answer.text) == (403, True), path
    for host in ("localhost", "127.0.0.1", "[::1]", "tandem.test", "TANDEM.test:80"):
        assert statuses(front.url, {"host": host}) == [200, 200], host


def test_pages_of_other_origins_are_refused_unless_they_are_listed(front: Any) -> None:
    body = {"model": "smollm2", "prompt": "a", "max_tokens": 1}
    own = {"origin": front.url}
    assert httpx.post(f"{front.url}/v1/completions", json=body, headers=own, timeout=60).status_code == 200, "the chat page"
    for origin in ("https://evil.test", "null", f"http://localhost:{front.port + 1}"):
        refused = httpx.post(f"{front.url}/v1/completions", json=body, headers={"origin": origin}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "origin")
        assert "access-control-allow-origin" not in refused.headers
    listed = httpx.post(f"{front.url}/v1/completions", json=body, headers={"origin": "https://chat.test"}, timeout=60)
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, "https://chat.test")
    assert statuses(front.url, {"origin": "https://chat.test"}) == [403, 200], "no other origin is an operator"


def test_preflights_are_answered_for_listed_origins_alone(front: Any) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = f"{front.url}/v1/chat/completions"
    allowed = httpx.options(url, headers=asked | {"origin": "https://chat.test"}, timeout=60)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.test")
    assert allowed.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    refused = httpx.options(url, headers=asked | {"origin": "https://evil.test"}, timeout=60)
    assert refused.status_code >= 400
    assert "access-control-allow-origin" not in refused.headers


def head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {length}", "", "")
    return "\r\n".join(lines).encode()


def dribble(port: int, begin: bytes) -> tuple[float, bytes]:
    """Send this, then a byte at a time. Seconds until the connection is closed, and what was answered."""
    begun, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.3)
        connection.sendall(begin)
        try:
            while time.monotonic() - begun < 30:
                connection.sendall(b"x")
                try:
                    data = connection.recv(4096)
                except TimeoutError:
                    continue
                if not data:
                    break
                answer += data
        except ConnectionError:
            pass
    return time.monotonic() - begun, answer


def test_slow_heads_and_bodies_are_cut_off(front: Any) -> None:
    """Each in its time, and a body that nobody wants soon."""
    attacks = {
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ": (HEADER_S, b"408"),
        b"": (HEADER_S, b""),
        head("/v1/completions", 10_000): (BODY_S, b"408"),
        head("/v1/nothing", 10_000): (DROP_S, b"404"),
    }
    with ThreadPoolExecutor() as pool:
        runs = {begin: pool.submit(dribble, front.port, begin) for begin in attacks}
        for begin, (deadline_s, status) in attacks.items():
            took_s, answer = runs[begin].result()
            assert deadline_s - 0.2 <= took_s <= deadline_s + LATE_S, begin
            assert status in answer.partition(b"\r\n")[0]


def read_slowly(port: int, num_bytes: int, over: threading.Event) -> None:
    """Ask for a long answer of half a kilobyte a token, and read so many bytes of it every half second until this is over."""
    fields = {"model": "smollm2", "prompt": "Once upon a time", "logprobs": 5, "max_tokens": 6_000}
    body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head("/v1/completions", len(body)) + body)
        while not over.wait(0.5):
            if num_bytes:
                connection.recv(num_bytes)


def complete(front: Any, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": "Count to a hundred: one, two,", "temperature": 0, "ignore_eos": True} | fields
    return httpx.post(f"{front.url}/v1/completions", json=body, timeout=120)


def test_clients_that_do_not_read_hold_nothing_and_disturb_nobody(front: Any) -> None:
    """One reads nothing, one a little at a time. Beside them a stream, and an answer that is long in coming."""
    alone = complete(front, max_tokens=60).json()["choices"][0]["text"]
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        for num_bytes in (0, 200):
            pool.submit(read_slowly, front.port, num_bytes, over)
        try:
            front.until(lambda: front.worker("worker-1")["running"] == 2, 20)
            quiet = pool.submit(complete, front, max_tokens=240)
            streamed = complete(front, max_tokens=60, stream=True).text
            events = [json.loads(line[len("data: ") :]) for line in streamed.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == alone
            assert quiet.result().json()["usage"]["completion_tokens"] == 240, "and it said nothing for longer than client_s"
            front.until(front.clean, 60)  # where 12,000 tokens take minutes
        finally:
            over.set()
    assert front.leaks() == []
