"""`serve deploy deploy/serve.yaml` on a Ray head node that runs already: a stream, a scale, refusals, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.ray.session import free_port, local_environment
from tests.integration.listening import listening
from tests.integration.local_processes import TANDEM, kill_marked, marked_processes, ray_head_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SERVE = str(Path(sys.executable).with_name("serve"))
SHIPPED = Path(__file__).parents[2] / "deploy" / "serve.yaml"
START_S = 150.0
GONE_S = 40.0


@dataclass
class Head:
    """A Ray head node on this machine with its dashboard, and the port that Tandem is to have."""

    environment: dict[str, str]
    mark: str
    http_port: int
    scratch: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def run(self, *command: str) -> str:
        """What another command says."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, **arguments: Any) -> None:
        """The shipped file, on the port of this test and with these arguments in place of its own."""
        shipped = yaml.safe_load(SHIPPED.read_text())
        (application,) = shipped["applications"]
        shipped["http_options"]["port"] = application["args"]["http"]["port"] = self.http_port
        application["args"] |= arguments
        path = self.scratch / "serve.yaml"
        path.write_text(yaml.safe_dump(shipped))
        self.run(SERVE, "deploy", str(path))

    def application(self) -> dict[str, Any]:
        """What `serve status` says of it."""
        status: dict[str, Any] = yaml.safe_load(self.run(SERVE, "status"))
        found: dict[str, Any] = status["applications"].get("tandem", {"status": "NONE", "message": ""})
        return found

    def await_status(self, wanted: str, message: str = "") -> None:
        """Until it has this state, with this in its message."""
        state: dict[str, Any] = {}

        def is_there() -> bool:
            state.update(self.application())
            return state["status"] == wanted and message in state["message"]

        until(is_there, START_S, lambda: state)

    def deployed(self) -> None:
        self.await_status("RUNNING")
        until(lambda: ready(self.url), GONE_S)

    def inventory(self) -> tuple[Counter[str], Counter[str]]:
        """Processes by name, and listening sockets by the name of their process. Ray keeps some idle processes ahead."""
        processes = {
            pid: command for pid, command in marked_processes(self.mark).items() if not command.startswith("ray::IDLE")
        }
        sockets: Counter[str] = Counter()
        for pid, command in processes.items():
            try:
                sockets[name_of(command)] += len(list(listening(pid)))
            except OSError:
                continue  # it ended meanwhile
        return Counter(name_of(command) for command in processes.values()), sockets


def name_of(command: str) -> str:
    return " ".join(Path(word).name for word in command.split()[:3])


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool], deadline_s: float, why: Callable[[], Any] = lambda: None) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < deadline_s, f"not within {deadline_s} s: {why()}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    port, dashboard_port, mark = free_port(), free_port(), uuid.uuid4().hex
    # In /tmp: a Unix socket's path has about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        own = local_environment(Path(scratch)) | {
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard_port}",
            "TANDEM_TEST_MARK": mark,
        }
        log = Path(scratch, "ray.log")
        environment = {key: value for key, value in (os.environ | own).items() if key != "RAY_ADDRESS"}
        try:
            with log.open("wb") as output:
                command = ray_head_command(port, scratch, dashboard_port)
                subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=START_S, check=True)
            yield Head(own, mark, free_port(), Path(scratch))
        finally:
            kill_marked(mark)


def test_deployed_scaled_and_shut_down_and_nothing_is_left(head: Head) -> None:
    until(lambda: bool(head.run(SERVE, "status")), START_S)  # the dashboard answers, and has made what it needs for that
    before = head.inventory()
    head.deploy()
    head.deployed()
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=60) as answer:
        lines = list(answer.iter_lines())
    assert any("Paris" in line for line in lines), lines
    assert "data: [DONE]" in lines

    environment = {"TANDEM_URL": head.url}
    scaled = subprocess.run([TANDEM, "scale", "decode=2", "routers=2"], env=os.environ | environment, timeout=90, check=False)
    assert scaled.returncode == 0

    def settled() -> bool:
        try:
            status = httpx.get(f"{head.url}/admin/status", timeout=10).raise_for_status().json()
        except httpx.HTTPError:
            return False  # HAProxy learns of another router just now
        states = [(worker["role"], worker["state"]) for worker in status["workers"]]
        return sorted(states) == [("decode", "ready"), ("decode", "ready"), ("prefill", "ready")]

    until(settled, START_S)
    until(lambda: head.application()["deployments"]["router"]["replica_states"] == {"RUNNING": 2}, START_S)
    assert httpx.get(f"{head.url}/admin/audit", timeout=10).json() == {"leaks": []}

    head.run(SERVE, "shutdown", "-y")
    until(lambda: head.inventory() == before, GONE_S, lambda: (before, head.inventory()))


@pytest.mark.long
def test_what_runs_is_not_replaced_and_a_killed_actor_goes_on_watching(head: Head) -> None:
    head.deploy()
    head.deployed()
    (deployment,) = [pid for pid, command in marked_processes(head.mark).items() if command.startswith("ray::Deployment")]
    os.kill(deployment, signal.SIGKILL)
    head.deploy(decode={"workers": 2})
    head.await_status("DEPLOY_FAILED", "another configuration")
    assert httpx.get(f"{head.url}/ready", timeout=10).status_code == httpx.codes.OK
    head.deploy()
    head.deployed()
    head.run(SERVE, "shutdown", "-y")
    head.deploy(decode={"workers": 2}, telemetry={"usage_log": str(head.scratch / "usage.jsonl")})
    head.deployed()
    assert len(httpx.get(f"{head.url}/admin/status", timeout=10).json()["workers"]) == 3, "the former cluster had to end first"
    head.deploy()
    head.await_status("DEPLOY_FAILED", "another configuration")
    head.run(SERVE, "shutdown", "-y")
    until(lambda: not any("Controller" in command for command in marked_processes(head.mark).values()), GONE_S)


@pytest.mark.long
def test_a_configuration_that_can_not_work_is_said_and_leaves_nothing(head: Head) -> None:
    until(lambda: not any(command.startswith("ray::Deployment") for command in marked_processes(head.mark).values()), GONE_S)
    head.deploy(decode={"workerz": 2})
    head.await_status("DEPLOY_FAILED", "decode.workerz: unknown key; did you mean decode.workers?")
    head.deploy(http={"port": free_port()})
    head.await_status("DEPLOY_FAILED", "nobody listens at")
    names = head.inventory()[0]
    assert not [name for name in names if "Deployment" in name or "WorkerProcess" in name or name.startswith("ray::Controller")]
    head.run(SERVE, "shutdown", "-y")
