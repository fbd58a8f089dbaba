"""One `tandem serve` as a stranger, a clumsy operator and a full disk would find it: sockets, sizes, audit log, logs."""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.sockets import documented, listeners

pytestmark = pytest.mark.slow

LOG_BYTES = 20_000


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def closed(serve: Callable[..., Any], audit_log: Path) -> Any:
    rates = audit_log.with_name("rates.yaml")
    rates.write_text("tiers: {standard: {requests_per_minute: 100000}}\n")
    logs = {"RAY_ROTATION_MAX_BYTES": str(LOG_BYTES), "RAY_ROTATION_BACKUP_COUNT": "1"}
    flags = ["--max-model-len", "512", "--audit-log", str(audit_log)]
    flags += ["--usage-log", str(audit_log.with_name("usage.jsonl")), "--config", str(rates)]
    served = serve(*flags, environment=logs)
    served.wait_ready()
    return served


def test_every_listening_socket_is_in_the_list(closed: Any) -> None:
    """Both ways: nothing listens that is not documented, and nothing is documented that does not listen."""
    deadline = time.monotonic() + 30
    while (found := listeners(closed.processes())) != documented() and time.monotonic() < deadline:
        time.sleep(0.5)  # processes that are about to begin, or to end
    assert sorted(found - documented()) == []
    assert sorted(documented() - found) == []


def test_more_workers_than_the_machine_holds_are_refused(closed: Any) -> None:
    for role in ("prefill", "decode"):
        refused = closed.scale(**{role: 1024})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, role)
        assert f"{role} must be 1 to 64 workers ({role}.max_workers), got 1024" in refused.json()["error"]["message"]
        refused = closed.scale(**{role: 64})
        message = refused.json()["error"]["message"]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, role)
        found = re.search(rf"{role}: 64 workers do not fit: there is room for at most (\d+) beside 1 ", message)
        assert found is not None, message
        assert 1 <= int(found[1]) < 64
    wanted = httpx.get(f"{closed.url}/admin/status", timeout=30).json()["wanted"]
    assert wanted == {"prefill": 1, "decode": 1}


def test_the_audit_log_tells_who_did_what(closed: Any, audit_log: Path) -> None:
    assert closed.scale(decode=1).status_code == 200

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in audit_log.read_text().splitlines()]

    closed.until(lambda: lines() and lines()[-1].get("decode") == 1, 10)
    assert [line["status"] for line in lines() if line.get("decode") == 1024] == [400], "what failed is there, too"
    scaled = lines()[-1]
    assert (scaled["event"], scaled["who"], scaled["status"], scaled["address"]) == ("scale", "operator", 200, "127.0.0.1")
    assert stat.S_IMODE(audit_log.stat().st_mode) == 0o600


def gcs_mib(cluster: Any) -> float:
    """Memory of Ray's GCS."""
    [pid] = [pid for pid, command in cluster.processes().items() if "gcs_server" in command.partition(" ")[0]]
    return float(re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def test_orders_leave_bounded_logs_and_nothing_in_the_gcs(closed: Any) -> None:
    """The controller writes a line for each order, and the router one for each request. Each is a call of several actors."""
    commands = " ".join(closed.processes().values())
    [session] = set(re.findall(r"/tmp/ray/session_[0-9_-]+", commands))
    before = gcs_mib(closed)
    for _ in range(600):
        assert closed.scale(decode=1).status_code == 200
    assert gcs_mib(closed) - before < 2.0
    logs = [path for path in (Path(session) / "logs").rglob("*") if re.search(r"(worker-|replica_).*", path.name)]
    sizes = {path.name: path.stat().st_size for path in logs}
    rotated = {name: size for name, size in sizes.items() if name.endswith(".1")}
    assert any(name.startswith("worker-") for name in rotated), sizes
    assert max(sizes.values()) <= LOG_BYTES + 1_000, sizes
    assert not any(name.endswith(".2") for name in sizes), sizes
