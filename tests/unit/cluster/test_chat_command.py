"""`tandem chat` in a process of its own: what a terminal and a shell may hand to it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.unit.http_servers import serving, url_of

WAIT_S = 30.0
ANSWER = {"choices": [{"delta": {"content": "5 € \u201cso\u201d"}}]}


class _Model(BaseHTTPRequestHandler):
    """Gives every chat the same answer. `models` is what it says of its models."""

    models: Any
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer(json.dumps(self.models))

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    _Model.models, _Model.asked = {"data": [{"id": "m"}]}, []
    with serving(_Model) as server:
        yield url_of(server)


def command(url: str, *flags: str | bytes) -> list[str | bytes]:
    return [sys.executable, "-c", "from cluster.commands.cli import main; main()", "chat", "--url", url, *flags]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape", "latin-1", "ascii"])
def test_characters_that_do_not_fit_cost_no_conversation(url: str, encoding: str) -> None:
    done = subprocess.run(
        command(url, "--system", b"caf\xe9"),
        input=b"caf\xe9\nmore\n/exit\n",
        capture_output=True,
        env=environment(PYTHONIOENCODING=encoding),
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"> 5 ") == 2
    assert [message["role"] for message in _Model.asked[1]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_line_can_be_edited(url: str) -> None:
    pytest.importorskip("readline")
    ours, its = pty.openpty()
    with subprocess.Popen(command(url), stdin=its, stdout=its, stderr=its, env=environment(TERM="xterm")) as process:
        os.close(its)
        os.write(ours, b"ct\x1b[Da\n/exit\n")  # the arrow to the left
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    assert _Model.asked[0]["messages"] == [{"role": "user", "content": "cat"}]


@pytest.mark.parametrize("models", [{"data": []}, {"data": None}, {"data": [{}]}, {}, [], 3])
def test_a_server_that_lists_no_model(url: str, models: Any) -> None:
    _Model.models = models
    done = subprocess.run(
        command(url), stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment(), timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (2, "tandem: the server lists no model; name one with --model\n")
