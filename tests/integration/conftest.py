"""A real cluster for all integration tests: the real `tandem serve`, in processes of its own, on a free port."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.ray.session import free_port
from tests.integration.local_processes import TANDEM, marked_processes

START_S = 150.0


@dataclass
class Served:
    """A running `tandem serve` and everything below it, known by a mark in the environment that all of it inherits."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    mark: str
    admin_key: str | None = None
    ca_file: str | None = None
    """Whom to trust for its certificate; None: it speaks plain HTTP."""
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"{'http' if self.ca_file is None else 'https'}://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """As an operator."""
        headers = {} if self.admin_key is None else {"authorization": f"Bearer {self.admin_key}"}
        verify = True if self.ca_file is None else ssl.create_default_context(cafile=self.ca_file)
        return httpx.request(method, self.url + path, headers=headers, verify=verify, timeout=30, **request)

    def wait_ready(self) -> None:
        """Until it says so. Fails with its log if it ends or takes too long."""
        self.until(lambda: "ready:" in self.said() or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, f"tandem serve ended:\n{self.said()}"

    def said(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], bool], deadline_s: float) -> float:
        """Seconds until the condition holds, looked at ten times a second. Fails at the deadline."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < deadline_s, f"not within {deadline_s} s; tandem serve said:\n{self.said()}"
            time.sleep(0.1)
        return time.monotonic() - begun

    def workers(self) -> list[dict[str, Any]]:
        answer = self.ask("GET", "/admin/status")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["workers"]
        return found

    def worker(self, worker_id: str) -> dict[str, Any]:
        (found,) = (worker for worker in self.workers() if worker["worker_id"] == worker_id)
        return found

    def scale(self, **sizes: int) -> httpx.Response:
        return self.ask("POST", "/admin/scale", json=sizes)

    def settled(self, prefill: int, decode: int) -> bool:
        """Just these workers exist, all of them ready, linked to the router and heard of."""
        workers = self.workers()
        roles = sorted(worker["role"] for worker in workers)
        usable = all(worker["state"] == "ready" and worker["running"] is not None for worker in workers)
        return usable and roles == sorted(["prefill"] * prefill + ["decode"] * decode)

    def clean(self) -> bool:
        """No worker holds a block, a ticket or a transfer."""
        return all(
            (worker["running"], worker["waiting"], worker["tickets"], worker["transfers"]) == (0, 0, 0, 0)
            and worker["free_blocks"] == worker["total_blocks"]
            for worker in self.workers()
        )

    def leaks(self) -> list[dict[str, Any]]:
        answer = self.ask("GET", "/admin/audit")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["leaks"]
        return found

    def processes(self) -> dict[int, str]:
        """What runs under the mark: process ids to command lines."""
        return marked_processes(self.mark)

    def command(
        self, *arguments: str, environment: dict[str, str] | None = None, timeout_s: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Another `tandem` command on this cluster."""
        variables = _without_ray() | {"TANDEM_URL": self.url} | (environment or {})
        return subprocess.run(
            [TANDEM, *arguments], env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def end(self, number: int = signal.SIGTERM) -> float:
        """Send a signal; seconds until the command has ended."""
        begun = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(timeout=30)
        return time.monotonic() - begun


def _without_ray() -> dict[str, str]:
    """This environment without what would make the command join a Ray cluster, or change its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def start_serve(
    log: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    command: str = TANDEM,
    folder: Path | None = None,
    ca_file: str | None = None,
) -> Served:
    """`tandem serve` with these flags, on a free port, with a Ray instance of its own unless a flag says otherwise.

    `folder` is its working directory, this process's own by default. `ca_file` is whom to trust for a cluster with TLS.
    """
    port, mark = free_port(), uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "serve", "--port", str(port), *flags],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_without_ray() | (environment or {}) | {"TANDEM_TEST_MARK": mark},
            start_new_session=True,
        )
    return Served(process, port, log, mark, (environment or {}).get("TANDEM_ADMIN_KEY"), ca_file)


def end_all(clusters: list[Served]) -> None:
    """Those that still run."""
    for served in clusters:
        if served.process.poll() is None:
            served.end()


@pytest.fixture(scope="session")
def tandem() -> str:
    """The command."""
    return TANDEM


@pytest.fixture(scope="session")
def started() -> Iterator[list[Served]]:
    """Every cluster of this session; all of them end with it."""
    clusters: list[Served] = []
    yield clusters
    end_all(clusters)


@pytest.fixture(autouse=True)
def nothing_leaks(started: list[Served]) -> Iterator[None]:
    """Every test ends with an audit of the clusters that it leaves running."""
    yield
    for served in started:
        if served.process.poll() is None and "ready:" in served.said():
            assert served.leaks() == []


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, started: list[Served]) -> Callable[..., Served]:
    """Starts clusters (see start_serve) that run to the session's end."""

    def start(*flags: str, **settings: Any) -> Served:
        served = start_serve(tmp_path_factory.mktemp("serve") / "log", *flags, **settings)
        started.append(served)
        return served

    return start


@pytest.fixture(scope="module")
def serve(launch: Callable[..., Served]) -> Iterator[Callable[..., Served]]:
    """Starts clusters that end with the module: memory and cores are for the next one's."""
    own: list[Served] = []

    def start(*flags: str, **settings: Any) -> Served:
        own.append(launch(*flags, **settings))
        return own[-1]

    yield start
    end_all(own)


@pytest.fixture(scope="session")
def shared_cluster(launch: Callable[..., Served]) -> Served:
    served = launch()
    served.wait_ready()
    return served


@pytest.fixture
def cluster(shared_cluster: Served) -> Served:
    """1 prefill + 1 decode worker, idle. Tests may scale and kill; the next test gets it whole again."""
    if not shared_cluster.settled(1, 1):
        assert shared_cluster.scale(prefill=1, decode=1).status_code == 200
        shared_cluster.until(lambda: shared_cluster.settled(1, 1), 60)
    shared_cluster.until(shared_cluster.clean, 20)
    return shared_cluster


@pytest.fixture
def two_decodes(cluster: Served) -> Served:
    """1 prefill + 2 decode workers, idle; otherwise as `cluster`."""
    assert cluster.scale(prefill=1, decode=2).status_code == 200
    cluster.until(lambda: cluster.settled(1, 2), 90)
    return cluster


@pytest.fixture
def two_quantized(serve: Callable[..., Served]) -> Served:
    """1 prefill + 2 decode workers of their own, with KV in eight bits."""
    cluster = serve("--decode", "2", "--kv-cache-dtype", "int8")
    cluster.wait_ready()
    cluster.until(lambda: cluster.settled(1, 2), 90)
    return cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, for tests of pages."""
    from playwright.sync_api import expect, sync_playwright

    from tests.integration.page_visit import CHROMIUM, DEADLINE_MS, FLAGS

    with sync_playwright() as playwright:
        expect.set_options(timeout=DEADLINE_MS)
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def base_url(shared_cluster: Served) -> str:
    return shared_cluster.url
