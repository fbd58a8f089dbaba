"""Commands that ask a server which is no Tandem cluster, or no OpenAI API: one line says so, and a chat goes on."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from rich.console import Console

from cluster.commands import cli
from cluster.commands.chat import Conversation, converse
from cluster.commands.lib import http_client
from cluster.commands.lib.http_client import ApiClient
from protocol.errors import UnavailableError
from tests.unit.http_servers import serving, url_of


class _Other(BaseHTTPRequestHandler):
    """Answers everything with `answer`."""

    answer: tuple[int, str]
    pause_s = 0.0

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self) -> None:
        time.sleep(self.pause_s)
        status, text = self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(_Other) as server:
        yield url_of(server)


@pytest.mark.parametrize("command", [["status"], ["audit"], ["top", "--once"], ["rollout", "--abort"], ["cache", "reset"]])
@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (404, '{"status": 404, "error": "Not Found"}', 'answered 404: {"status": 404, "error": "Not Found"}'),
        (404, '{"error": {"detail": "no"}}', 'answered 404: {"error": {"detail": "no"}}'),
        (200, '{"ok": true}', "it is no Tandem cluster"),
        (200, '{"workers": null, "leaks": 3}', "it is no Tandem cluster"),
        (200, "[1]", "it is no Tandem cluster"),
        (200, "[" * 100_000, "it is no Tandem cluster"),
    ],
)
def test_a_server_that_is_no_cluster_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    command: list[str],
    status: int,
    answer: str,
    words: str,
) -> None:
    _Other.answer = status, answer
    monkeypatch.setattr("sys.argv", ["tandem", *command, "--url", url])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ('data: {"error": "overloaded"}\n\n', "overloaded"),
        ('data: {"error": {"detail": "no"}}\n\n', "{'detail': 'no'}"),
        ("data: <html>\n\n", "the answer is not as in OpenAI's API: <html>"),
        ("data: [1]\n\n", "the answer is not as in OpenAI's API: [1]"),
        ('data: {"choices": [3]}\n\n', "the answer is not as in OpenAI's API: {'choices': [3]}"),
        ('data: {"choices": [{"delta": {"content": 3}}]}\n\n', "the answer is not as in OpenAI's API"),
        ('data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n', "the answer is not as in OpenAI's API"),
        ('data: {"object": "ping"}\n\n', "no answer"),
        ('data:{"choices": [{"delta": {"content": "Hello."}}], "usage": {}}\n\ndata:[DONE]\n\n', "Hello."),
        ('data: {"choices": [{"delta": {"content": "a[:x:]\\tb"}}]}\n\ndata: [DONE]\n\n', "a[:x:]\tb"),
        ('data: {"error": "no a[:x:]"}\n\n', "no a[:x:]"),
    ],
)
def test_a_chat_goes_on_after_odd_events(url: str, monkeypatch: pytest.MonkeyPatch, events: str, said: str) -> None:
    _Other.answer = 200, events
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/exit\n"))
    shown = io.StringIO()
    converse(ApiClient(url, None), Conversation("m"), Console(width=200, file=shown))
    assert said in shown.getvalue()


def test_nobody_commands_the_terminal(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b]0;title\x07b\x9b31m\r\n\tc\x7f"
    answers = [{"choices": [{"delta": {"content": evil}}]}, {"error": {"message": evil}}]
    _Other.answer = 200, "".join(f"data: {json.dumps(each)}\n\n" for each in answers)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/exit\n"))
    file = io.StringIO()
    converse(ApiClient(url, None), Conversation(evil), Console(file=file, width=200))
    assert file.getvalue().count("a]0;titleb31m\n\tc") + file.getvalue().count("a]0;titleb31m\n        c") == 3
    assert [char for char in file.getvalue() if not char.isprintable() and char not in "\n\t"] == []
    _Other.answer = 502, evil
    monkeypatch.setattr("sys.argv", ["tandem", "status", "--url", url])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert said.endswith("answered 502: a]0;titleb31m c\n")
    assert "\x1b" not in said


def test_a_cache_may_take_longer_to_erase(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_client, "_ANSWER_S", 0.1)
    monkeypatch.setattr(_Other, "pause_s", 0.5)
    _Other.answer = 200, '{"workers": []}'
    monkeypatch.setattr("sys.argv", ["tandem", "cache", "reset", "--url", url])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr().err
    with pytest.raises(UnavailableError, match="timed out"):
        ApiClient(url, None).get("/admin/status")
