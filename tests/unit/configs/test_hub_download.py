"""Downloads by the real client of the Hugging Face hub, from a small hub of this test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from configs.model_files.hf_hub import fetch_snapshot
from configs.model_files.hub_download import download
from protocol.errors import ConfigError, UnavailableError
from tests.unit.http_servers import serving

COMMIT = "0" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
WAIT_S = 30.0


class _Hub(BaseHTTPRequestHandler):
    """Serves one repository, as far as the name of it lets it."""

    def do_HEAD(self) -> None:
        self._answer(FILES[Path(self.path).name])

    def do_GET(self) -> None:
        names = ["m-Q4_0.gguf"] if "/m-GGUF/" in self.path else list(FILES)
        if "/resolve/" in self.path:
            data = FILES[Path(self.path).name]
            self._answer(data[:1])
            if data == FILES["model.safetensors"] and not self._weights(self.path.split("/")[2]):
                return
            self.wfile.write(data[1:])
        elif "/tree/" in self.path:
            self._answer(json.dumps([{"type": "file", "path": name, "size": 7, "oid": "1" * 40} for name in names]))
        elif "/closes/" in self.path:
            return
        else:
            self._answer(json.dumps({"id": "org/any", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}))

    def _weights(self, repository: str) -> bool:
        """Whether the rest of the weights is sent. `hangs` waits until the client has left."""
        if repository == "hangs":
            self.server.asked.set()  # type: ignore[attr-defined]
            with suppress(OSError):
                self.connection.settimeout(WAIT_S)
                self.rfile.read(1)
        return repository == "whole"

    def _answer(self, body: bytes | str) -> None:
        data = body.encode() if isinstance(body, str) else body
        name = Path(self.path).name
        self.send_response(200)
        self.send_header("Content-Length", str(len(FILES.get(name, data))))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with serving(_Hub) as server:
        server.asked = threading.Event()  # type: ignore[attr-defined]
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server


def test_a_model_is_downloaded(hub: ThreadingHTTPServer) -> None:
    folder = fetch_snapshot("org/whole")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_what_another_program_left_out_is_downloaded(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no chat without the template in tokenizer_config.json, and a model all the same while nobody answers."""
    repository = Path(constants.HF_HUB_CACHE) / "models--org--whole"
    fetched = repository / "snapshots" / COMMIT / "tokenizer_config.json"
    for folder in (fetched.parent, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name in FILES.keys() - {fetched.name}:
        (fetched.parent / name).write_bytes(FILES[name])
    with monkeypatch.context() as alone:
        alone.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        assert fetch_snapshot("org/whole") == fetched.parent
    assert not fetched.exists()
    assert fetch_snapshot("org/whole") == fetched.parent
    assert fetched.exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert fetch_snapshot("org/whole") == fetched.parent, "nothing is asked for"


def test_a_repository_of_gguf_files(hub: ThreadingHTTPServer) -> None:
    with pytest.raises(ConfigError, match=r"org/m-GGUF has no config\.json .*; download a \.gguf file and give its path"):
        fetch_snapshot("org/m-GGUF")


@pytest.mark.parametrize("repository", ["closes", "breaks"])
def test_a_connection_that_breaks_may_hold_the_next_time(hub: ThreadingHTTPServer, repository: str) -> None:
    with pytest.raises(
        UnavailableError, match=rf"can't fetch org/{repository} from the .* hub.*: RemoteProtocolError: "
    ) as broken:
        fetch_snapshot(f"org/{repository}")
    assert broken.value.param == "model"


def test_nobody_answers(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"can't fetch org/whole .*: check the network"):
        fetch_snapshot("org/whole")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("ALL_PROXY", "socks://127.0.0.1:1"),
        ("SSL_CERT_FILE", "/absent.pem"),
        ("HF_ENDPOINT", "http://a..b"),
    ],
)
def test_settings_that_the_client_cant_use(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="can't fetch org/whole from the Hugging Face hub"):
        fetch_snapshot("org/whole")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Task error: CAS Client Error: error sending request"), UnavailableError),
        (ConnectionResetError("reset"), UnavailableError),
        (OSError("no space left"), ConfigError),
    ],
)
def test_which_failures_may_pass(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]) -> None:
    def fails(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(kind, match=f"{type(error).__name__}: {error}"):
        download("org/any")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_at_once_with_who_wants_it(hub: ThreadingHTTPServer, number: signal.Signals) -> None:
    program = "from configs.model_files.hf_hub import fetch_snapshot; fetch_snapshot('org/hangs')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Standard error is at its end when both processes are.
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment) as process:
        assert hub.asked.wait(WAIT_S)  # type: ignore[attr-defined]
        began = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == -number
        assert time.monotonic() - began < 5.0
