"""A real Prometheus with the rules of `deploy/prometheus`, beside a cluster on this machine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.ray.session import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULE_FILES = ("recording.yml", "alerts.yml")
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
START_S = 20.0
END_S = 20.0


@dataclass
class Prometheus:
    """A running Prometheus, which scrapes and evaluates once a second."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Fails with the reason if there is none."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now, each with its `metric` and its `value`."""
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> list[dict[str, Any]]:
        return [alert for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"]

    def until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Wait until the condition holds, looking at it five times a second. Fails at the deadline, with what was scraped."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"prometheus ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not within {deadline_s} s:\n{self._state()}"
            time.sleep(0.2)

    def _state(self) -> str:
        targets = self.ask("targets")["activeTargets"] if self.is_ready() else "not ready"
        return f"{targets}\n{self.log.read_text()}"

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=END_S)


def start_prometheus(folder: Path, target: str, key: str) -> Prometheus:
    """Start one in this folder, ready to answer, that scrapes `target` with a bearer key.

    Its files are those of `deploy/prometheus`, but for the times: nothing waits before it fires.
    """
    assert PROMETHEUS is not None
    for name in RULE_FILES:
        (folder / name).write_text(yaml.safe_dump(impatient(yaml.safe_load((DEPLOY / "prometheus" / name).read_text()))))
    (folder / "key").write_text(key)
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    job["authorization"] = {"credentials_file": str(folder / "key")}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    started = Prometheus(process, f"http://{address}", log)
    try:
        started.until(started.is_ready, START_S)
    except BaseException:
        process.kill()
        process.wait(timeout=END_S)
        raise
    return started


def impatient(file: dict[str, Any]) -> dict[str, Any]:
    """The rules of a file without the times for which a condition has to hold, and evaluated at every turn."""
    for group in file["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            rule.pop("for", None)
    return file
