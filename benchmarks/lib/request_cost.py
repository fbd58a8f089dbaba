"""What requests cost a running Tandem cluster: the time to a first token, and processor time outside the engines."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.lib import processes
from benchmarks.lib.servers import HOST

_T = TypeVar("_T")


def first_token_s(connection: http.client.HTTPConnection, prompt: list[int]) -> float:
    """Seconds from sending a streamed completion of two tokens to the first event."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.readline()
    took = time.perf_counter() - began
    answer.read()
    return took


def during(serve_pid: int, workers: dict[int, str], work: Callable[[], _T]) -> tuple[_T, float, dict[str, float]]:
    """Run `work`. Returns its result, the seconds it took, and CPU seconds outside the engine by process name.

    `serve_pid` is the process of `tandem serve`, `workers` its workers as `worker_pids` knows them. The busiest thread of each
    worker is taken for its engine.
    """
    pids = processes.tree(serve_pid)
    before = {pid: processes.cpu_s(pid) for pid in pids}
    threads = {pid: processes.thread_cpu_s(pid) for pid in workers}
    began = time.perf_counter()
    result = work()
    took = time.perf_counter() - began
    spent: dict[str, float] = {}
    for pid, name in pids.items():
        used = processes.cpu_s(pid) - before[pid]
        if pid in workers:
            name = workers[pid]
            now = processes.thread_cpu_s(pid)
            used -= max(now[thread] - threads[pid].get(thread, 0.0) for thread in now)
        spent[name] = spent.get(name, 0.0) + used
    return result, took, spent


def worker_pids(port: int) -> dict[int, str]:
    """Process ids of the workers of the cluster on this port, each with its role for people."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", "/admin/status")
    workers = json.loads(connection.getresponse().read())["workers"]
    connection.close()
    return {worker["pid"]: f"{worker['role']} worker" for worker in workers}
