"""`deploy/` with a real Prometheus: promtool takes the files, it scrapes a cluster, panels have data, and an alert fires."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.cluster_view import WorkerState
from protocol.messages.load import GpuReport
from protocol.messages.workers import Duty
from telemetry.cluster_metrics import ClusterSample, WorkerSample
from telemetry.metrics import Metrics
from tests.integration.prometheus_server import DEPLOY, PROMETHEUS, PROMTOOL, RULE_FILES, Prometheus, start_prometheus
from tests.unit.load_reports import load_report

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="no prometheus and promtool in PATH (Debian: apt-get install prometheus)",
)

METRICS_KEY = "look"
CLIENTS = 6
CHOSEN = {"$instance": ".*", "$model_name": ".*", "$tenant": ".*", "$__rate_interval": "10s", "$__range": "1m"}
"""What the test puts where Grafana puts what was chosen."""
ZERO = " or vector(0)"
SHOWN_AS_ZERO = {
    "Alerts",
    "Alerts that fire",
    "Copies that were not made",
    "Decisions of the autoscaler",
    "Events and lines that are lost",
    "Lines that wait for Kafka",
    "Phase of the latest rollout",
    "Requests in the usage log",
    "Requests refused for want of room",
    "Share of guessed tokens that were right",
    "Share of new requests that a new configuration gets",
    "Streams of several arithmetics",
    "Streams that did not move",
    "Tenants with traffic",
    "Workers by the revision of their configuration",
}
"""Panels of what need not happen, in this test or ever. All others have data of their own."""
OF_GPUS = "tandem:gpu_"
"""Beginning of the names of what only a worker on a GPU tells."""


@dataclass(frozen=True)
class Asked:
    """A query of a panel."""

    board: str
    panel: str
    expr: str


def panel_queries() -> list[Asked]:
    """Every query of every dashboard, as Grafana would send it."""
    found = []
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                for sign, meaning in CHOSEN.items():
                    expr = expr.replace(sign, meaning)
                found.append(Asked(board["title"], panel["title"], expr))
    return found


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    folder = DEPLOY / "prometheus"
    done = subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_files() -> None:
    said = promtool("check", "config", "prometheus.yml")
    for name in RULE_FILES:
        assert name in said
    promtool("check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)


def test_every_alert_fires_in_made_up_series_and_none_in_good_ones() -> None:
    assert "SUCCESS" in promtool("test", "rules", "tests.yml")


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """1 prefill + 2 decode workers that compute nothing, with both tiers, so that no panel lacks its metric."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = folder / "cluster.yaml"
    config.write_text(f"http: {{metrics_key: {METRICS_KEY}}}\n")
    tiers = ("--kv-offloading-size", "0.5", "--kv-offloading-dir", str(folder / "kv"), "--kv-offloading-disk-size", "0.5")
    workers = ("--engine", "paced", "--prefill", "1", "--decode", "2", "--disaggregation", "always")
    served = serve("--config", str(config), *workers, *tiers)
    served.wait_ready()
    served.until(lambda: served.settled(1, 2), 60)
    return served


@pytest.fixture(scope="module")
def prometheus(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = start_prometheus(tmp_path_factory.mktemp("prometheus"), cluster.url.removeprefix("http://"), METRICS_KEY)
    yield started
    started.end()


def has_numbers(prometheus: Prometheus, expr: str) -> bool:
    """Whether the expression has a series now that is not NaN, as a quantile or a share of nothing is."""
    return any(not math.isnan(float(each["value"][1])) for each in prometheus.query(expr))


def ask_until(stop: threading.Event, url: str, number: int) -> int:
    """Ask again and again, half of the answers to the end. Returns how many these were."""
    rng, answered = random.Random(number), 0
    beginning = list(range(1000, 1256))
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            prompt = beginning + [rng.randrange(1000, 40_000) for _ in range(64)]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            answered += 1
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
                next(stream.iter_lines())  # and away
    return answered


def drain_busy_worker(cluster: Any) -> None:
    """Drain a decode worker that has streams, and let it start anew, unless a worker is away already."""
    if cluster.settled(1, 2):
        busy = [each["worker_id"] for each in cluster.workers() if each["role"] == "decode" and each["running"]]
        for worker_id in busy[:1]:
            assert cluster.command("drain", worker_id, "--restart", "--wait", "0").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_panel_has_data(cluster: Any, prometheus: Prometheus) -> None:
    """Under a little load, of which some clients leave, and some streams move because a worker is drained."""
    left = [asked for asked in panel_queries() if OF_GPUS not in asked.expr]
    assert {asked.panel for asked in left if asked.expr.endswith(ZERO)} == SHOWN_AS_ZERO

    def all_have_data() -> bool:
        drain_busy_worker(cluster)
        left[:] = [asked for asked in left if not has_numbers(prometheus, asked.expr)]
        return not left

    stop = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as threads:
        try:
            clients = [threads.submit(ask_until, stop, cluster.url, number) for number in range(CLIENTS)]
            prometheus.until(all_have_data, 90)
        except AssertionError:
            pytest.fail("no data in\n" + "\n".join(map(str, left)))
        finally:
            stop.set()
        assert all(client.result() > 0 for client in clients)
    cluster.until(lambda: cluster.settled(1, 2), 60)


@pytest.fixture
def page_of_gpus() -> Iterator[str]:
    """Where the metrics of a worker are shown that says what a GPU would tell: nothing of it needs one but the reading."""
    gpu = GpuReport("GPU-1", 0.75, 60 << 30, 80 << 30, 64, 412.5, 1, 79)
    report = replace(load_report("worker-1"), gpus=(gpu,))
    workers = [WorkerSample("worker-1", Duty.DECODE, WorkerState.READY, 0, 0, report)]
    metrics = Metrics("smollm2", lambda: ClusterSample(workers))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics.render(metrics.sample()))

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_panels_of_gpus_have_data_where_workers_report_some(page_of_gpus: str, tmp_path: Path) -> None:
    queries = [asked for asked in panel_queries() if OF_GPUS in asked.expr]
    assert len(queries) == 6
    started = start_prometheus(tmp_path, page_of_gpus, METRICS_KEY)
    try:
        started.until(lambda: all(has_numbers(started, asked.expr) for asked in queries), 20)
        started.until(lambda: "TandemGpuErrors" in {alert["labels"]["alertname"] for alert in started.firing()}, 20)
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_rule_can_be_evaluated(cluster: Any, prometheus: Prometheus) -> None:
    prometheus.until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), 30)
    burns = {each["metric"]["slo"]: float(each["value"][1]) for each in prometheus.query("tandem_slo:burn_rate5m")}
    assert burns.keys() == {"ttft", "inter_token", "errors"}
    assert not any(math.isnan(burn) for burn in burns.values())
    assert burns["errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_alert_fires_when_a_worker_dies_again_and_again(cluster: Any, prometheus: Prometheus) -> None:
    (worker_id,) = (each["worker_id"] for each in cluster.workers() if each["role"] == "prefill")

    def flapping() -> list[dict[str, Any]]:
        labels = {"alertname": "TandemWorkersFlapping", "worker": worker_id}
        return [alert for alert in prometheus.firing() if labels.items() <= alert["labels"].items()]

    assert flapping() == []
    for _ in range(3):
        victim = cluster.worker(worker_id)
        os.kill(victim["pid"], signal.SIGKILL)
        cluster.until(lambda epoch=victim["epoch"]: cluster.worker(worker_id)["epoch"] > epoch, 60)
        cluster.until(lambda: cluster.settled(1, 2), 60)
    prometheus.until(lambda: len(flapping()) == 1, 30)
    (alert,) = flapping()
    assert alert["labels"]["severity"] == "ticket"
    assert alert["annotations"]["runbook_url"] == "docs/alerts/TandemWorkersFlapping.md"
    assert f"{worker_id} was started anew" in alert["annotations"]["description"]
    assert "level=warn" not in prometheus.log.read_text(), "some rule could not be evaluated at some time"
