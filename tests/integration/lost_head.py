"""A head that is lost and comes back, with its `tandem serve`; run by test_lost_head.py, in a network of its own.

Says what an operator saw, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx

from benchmarks.lib.ray_nodes import ADMIN_KEY, RayNodes, ray_nodes

CONFIG = """
disaggregation: always
limits: {lease_s: 3, shutdown_s: 5}
prefill: {kv_cache_tokens: 16384, resources: {tandem_prefill: 1}}
decode: {kv_cache_tokens: 16384, resources: {tandem_decode: 1}}
"""
_LONGEST_S = 60.0


def answered(nodes: RayNodes) -> tuple[str, dict[str, tuple[int, int]]]:
    """An answer, and the process and the epoch of each worker that is ready."""
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    with httpx.Client(base_url=nodes.url, timeout=30, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        workers = client.get("/admin/status").json()["workers"]
    lives = {worker["worker_id"]: (worker["pid"], worker["epoch"]) for worker in workers if worker["state"] == "ready"}
    return answer.json()["choices"][0]["text"], lives


def soon_answered(nodes: RayNodes) -> tuple[str, dict[str, tuple[int, int]]]:
    """The same, as soon as both workers are linked to the router."""
    deadline = time.monotonic() + _LONGEST_S
    while True:
        try:
            return answered(nodes)
        except (httpx.HTTPError, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def scenario(nodes: RayNodes) -> dict[str, Any]:
    before = answered(nodes)
    second = nodes.serve_beside()
    nodes.lose_head()
    nodes.start_head()
    nodes.serve()
    after = soon_answered(nodes)
    code = nodes.end_serve()
    nodes.serve()
    return {
        "before": before,
        "second": second,
        "after": after,
        "anew": answered(nodes),
        "codes": [code, nodes.end_serve()],
    }


def main() -> None:
    with ray_nodes(1, CONFIG) as nodes:
        try:
            sys.stdout.write(json.dumps(scenario(nodes)) + "\n")
        except BaseException:
            sys.stderr.write(nodes.said())
            raise


if __name__ == "__main__":
    main()
