"""`tandem audit` on a cluster that works, and on one with a worker that hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow


def ask(cluster: Any, number: int) -> None:
    body = {"model": "smollm2", "prompt": f"Chapter {number}. " * 40, "max_tokens": 60, "ignore_eos": True}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_working_cluster_is_clean_at_every_look(cluster: Any) -> None:
    requests = [threading.Thread(target=ask, args=(cluster, number)) for number in range(12)]
    for request in requests:
        request.start()
    found = []
    while any(request.is_alive() for request in requests):
        found += cluster.leaks()
    for request in requests:
        request.join()
    assert found == []
    audited = cluster.command("audit", "--json")
    assert (audited.returncode, json.loads(audited.stdout)) == (0, {"leaks": []}), audited.stderr


def test_a_worker_that_hangs_is_named(cluster: Any) -> None:
    worker = cluster.worker("worker-0")
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        audited = cluster.command("audit")
    finally:
        os.kill(worker["pid"], signal.SIGCONT)
    line = f"worker-0 (epoch {worker['epoch']}): did not answer within 2 s\n"
    assert (audited.returncode, audited.stdout) == (1, line), audited.stderr
    cluster.until(lambda: cluster.command("audit").returncode == 0, 20)
