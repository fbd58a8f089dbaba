"""`tandem rollout` that is ended from outside puts back what it has changed for its own time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cluster.commands.lib.interrupts import undone_when_ended
from protocol.cluster_view import PAUSED_BY_HAND
from tests.unit.http_servers import serving

WAIT_S = 30.0
PROGRAM = """
import signal
from cluster.commands.cli import main
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
main()
"""
WORKERS = [
    {"worker_id": f"worker-{number}", "role": role, "state": "ready", "epoch": 1, "running": 0, "last_error": None}
    for number, role in enumerate(("prefill", "decode"))
]


class _Cluster(BaseHTTPRequestHandler):
    """Has an autoscaler and a worker of each role, and never gets another one."""

    orders: list[Any]
    asked: threading.Event

    def do_GET(self) -> None:
        paused = PAUSED_BY_HAND if {"action": "pause"} in self.orders else None
        self._answer({"workers": WORKERS, "wanted": {"prefill": 1, "decode": 1}, "autoscaler": {"paused": paused}})

    def do_POST(self) -> None:
        self.orders.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.path == "/admin/scale":
            self.asked.set()
        self._answer({})

    def _answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def cluster() -> Iterator[ThreadingHTTPServer]:
    _Cluster.orders, _Cluster.asked = [], threading.Event()
    with serving(_Cluster) as server:
        yield server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_extra_worker_goes_and_the_autoscaler_goes_on(cluster: ThreadingHTTPServer, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, "rollout"]
    command += ["--url", f"http://127.0.0.1:{cluster.server_port}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert _Cluster.asked.wait(WAIT_S)
        process.send_signal(number)
        said = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert _Cluster.orders == [{"action": "pause"}, {"prefill": 2}, {"prefill": 1}, {"action": "resume"}]


def test_only_the_first_signal_counts() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def end_three_times() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)

    with pytest.raises(SystemExit) as ended, undone_when_ended():
        end_three_times()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with undone_when_ended():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
