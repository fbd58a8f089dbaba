"""What the real HAProxy makes of routers that die under requests, and of routers that are not there."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, RemoteDisconnected
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from cluster.ray.haproxy_guard import FrontSettings, settings_path
from cluster.ray.session import free_port
from tests.unit.cluster.real_haproxy import haproxy
from tests.unit.http_servers import serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="HAProxy's binary comes for Linux only")

CONFIGURATION = """global
    stats socket {directory}/admin.sock mode 666 level admin
defaults
    mode http
    timeout connect 1s
    timeout server 10s
    option redispatch 1
    retry-on conn-failure
    errorfile 502 /of/serve
    balance roundrobin
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend http-tandem
backend http-tandem
    http-reuse always
"""


class Dying(BaseHTTPRequestHandler):
    """A router that dies of every request except GET /kept, whose connection it keeps."""

    protocol_version = "HTTP/1.1"
    died_of: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/kept":
            self.died_of.append(self.command)
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = do_DELETE = answer


class Living(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.send_response(200)
        self.end_headers()

    do_GET = do_HEAD = do_POST = do_DELETE = answer


@contextlib.contextmanager
def entry(folder: Path, routers: list[int]) -> Iterator[int]:
    """HAProxy before routers at these ports, as soon as it listens; yields its own."""
    path, port = folder / "haproxy.cfg", free_port()
    servers = "".join(f"    server S{router} 127.0.0.1:{router}\n" for router in routers)
    path.write_text(CONFIGURATION.format(directory=folder, port=port) + servers)
    FrontSettings("t0ken", 10.0, 60.0, None, "127.0.0.1").save(settings_path(path))
    with haproxy(path, port):
        yield port


def ask(port: int, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer on a connection of its own; status 0 is a connection closed without a word."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    except RemoteDisconnected:
        return 0, {}, b""
    finally:
        connection.close()


@pytest.mark.parametrize("kept", [False, True], ids=["new_connection", "kept_connection"])
@pytest.mark.parametrize(("method", "tried_again"), [("GET", True), ("HEAD", True), ("POST", False), ("DELETE", False)])
def test_what_changes_nothing_goes_to_another_router(tmp_path: Path, method: str, tried_again: bool, kept: bool) -> None:
    """What may have been obeyed is not repeated: its client gets an error, or a connection closed without a word where HAProxy
    had kept the one to the router from earlier on.
    """
    Dying.died_of.clear()
    with serving(Dying) as dying, serving(Living) as living, entry(tmp_path, [dying.server_port, living.server_port]) as port:
        seen = []
        while not Dying.died_of:
            if kept:
                assert {ask(port, "GET", "/kept")[0] for _ in range(2)} == {200}
            seen.append(ask(port, method, "/x")[0])
    assert Dying.died_of == [method]
    assert seen[-1] == (200 if tried_again else 0 if kept else 502)
    assert set(seen[:-1]) <= {200}


@pytest.mark.parametrize(("lost", "status"), [(True, 502), (False, 503)])
def test_errors_look_like_those_of_routers(tmp_path: Path, lost: bool, status: int) -> None:
    with serving(Dying) as dying, entry(tmp_path, [dying.server_port if lost else free_port()]) as port:
        told, headers, body = ask(port, "POST", "/v1/completions")
    assert (told, headers["content-type"], headers["retry-after"]) == (status, "application/json", "1")
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "unavailable")
    assert "router" in error["message"]
