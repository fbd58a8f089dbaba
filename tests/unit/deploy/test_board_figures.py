"""What panels show of series that are made up, as promtool reads their queries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.boards import BOARDS
from deploy.grafana.build import dashboard

PROMTOOL = shutil.which("promtool")
CHOSEN = {"$instance": ".*", "$model_name": ".*"}
"""What stands where Grafana puts what was chosen."""
WAITING, RUNNING = "tandem:num_requests_waiting", "tandem:num_requests_running"
OVERVIEW = ("tandem-overview", "Requests under way")
BALANCE = ("tandem-balance", "Requests that wait")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def queries(uid: str, title: str) -> dict[str, str]:
    """The expressions of a panel by their legends."""
    (board,) = (dashboard(each) for each in BOARDS if each.uid == uid)
    (panel,) = (each for each in board["panels"] if each["title"] == title)
    found = {}
    for target in panel["targets"]:
        expr = target["expr"]
        for sign, meaning in CHOSEN.items():
            expr = expr.replace(sign, meaning)
        found[target["legendFormat"]] = expr
    return found


def series(name: str, worker: str, value: int, instance: str = "a:8000") -> dict[str, str]:
    role = worker.partition("-")[0]
    labels = f'instance="{instance}", model_name="m", worker="{worker}", role="{role}"'
    return {"series": f"{name}{{{labels}}}", "values": str(value)}


def check(folder: Path, given: list[dict[str, str]], wanted: dict[str, int]) -> None:
    """Assert that each expression has its value, or none where it is to be nothing."""
    asked: list[dict[str, Any]] = [
        {"expr": expr, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": value}]} for expr, value in wanted.items()
    ]
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump({"tests": [{"input_series": given, "promql_expr_test": asked}]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_request_counts_once_where_prompts_wait_for_prefill_workers(tmp_path: Path) -> None:
    """Its room at a decode worker is kept meanwhile, and counts there as one that waits."""
    given = [
        *(series(RUNNING, "prefill-0", 1), series(WAITING, "prefill-0", 49)),
        *(series(RUNNING, "decode-0", 4), series(WAITING, "decode-0", 50)),
        *(series(RUNNING, "both-0", 2), series(WAITING, "both-0", 3)),
    ]
    balance = queries(*BALANCE)
    wanted = {
        queries(*OVERVIEW)["at workers"]: 1 + 49 + 4 + 2,
        balance["at prefill workers"]: 49,
        balance["at decode workers"]: 3,
    }
    check(tmp_path, given, wanted)


def test_a_cluster_without_prefill_workers_has_its_prompts_at_decode_workers(tmp_path: Path) -> None:
    given = [
        *(series(RUNNING, "both-0", 4, "b:8000"), series(WAITING, "both-0", 6, "b:8000")),
        *(series(RUNNING, "prefill-0", 1), series(WAITING, "prefill-0", 2)),
        *(series(RUNNING, "decode-0", 4), series(WAITING, "decode-0", 3)),
    ]
    check(tmp_path, given, {queries(*OVERVIEW)["at workers"]: 4 + 6 + 1 + 2 + 4})
    check(tmp_path, given[:2], {queries(*OVERVIEW)["at workers"]: 10, queries(*BALANCE)["at decode workers"]: 6})
