"""Answers of /admin/status and /metrics of clusters that tests make up, as the pages and `tandem top` read them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics

Status = dict[str, Any]
STRANGE_NAME = 'a "model", {of} \\ mine'


def worker(worker_id: str, **fields: Any) -> dict[str, Any]:
    """A row of /admin/status, of an idle worker unless `fields` say otherwise."""
    row = {
        "worker_id": worker_id,
        "role": worker_id.partition("-")[0],
        "epoch": 1,
        "state": "ready",
        "linked": True,
        "restarts": 0,
        "last_error": None,
        "quick_ends": 0,
        "start_delay_s": 0.0,
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "kv_usage": 0.0,
        "cached_tokens": 0,
        "busy_s": 0.0,
        "step_age_s": 0.0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
    }
    return row | fields


def unheard(worker_id: str, **fields: Any) -> dict[str, Any]:
    """The row of a worker that has not reported yet."""
    reported = ("running", "waiting", "queued_tokens", "kv_usage", "cached_tokens", "busy_s", "step_age_s")
    nothing = dict.fromkeys((*reported, "prefix_cache_queries", "prefix_cache_hits"))
    return worker(worker_id, state="starting", linked=False, **nothing) | fields


def status(*workers: Mapping[str, Any], **wanted: int) -> Status:
    """An answer of /admin/status; as many workers are wanted as there are unless `wanted` says otherwise."""
    roles = ["decode" if row["role"] == "both" else row["role"] for row in workers]
    return {"workers": list(workers), "wanted": {role: roles.count(role) for role in sorted(set(roles))} | wanted}


class Counts:
    """The metrics of a cluster whose routers count what tests tell them."""

    def __init__(self, model: str = "smollm2") -> None:
        self.metrics = Metrics(model, ClusterSample)

    def request(self, queue_s: float, prefill_s: float, decode_s: float, prompt_tokens: int = 10, tokens: int = 20) -> None:
        """Count a request that ended."""
        self.metrics.request_queue_time.observe(queue_s)
        self.metrics.request_prefill_time.observe(prefill_s)
        self.metrics.request_decode_time.observe(decode_s)
        self.metrics.time_to_first_token.observe(queue_s + prefill_s)
        self.metrics.prompt_tokens.inc(prompt_tokens)
        self.metrics.generation_tokens.inc(tokens)
        for _ in range(tokens - 1):
            self.metrics.inter_token_latency.observe(decode_s / tokens)
        self.metrics.succeeded("stop")

    def text(self) -> str:
        """An answer of /metrics."""
        return self.metrics.render(self.metrics.sample()).decode()


def random_pair(rng: random.Random) -> list[dict[str, Any]]:
    """Two polls of a cluster that changes as it likes in between: workers come, go, die, and say nothing."""
    counts, polls = Counts(STRANGE_NAME), []
    duties = {"prefill": ["prefill"], "decode": ["decode", "both"]}
    rows = [worker(f"{role}-{n}", role=rng.choice(duties[role])) for role in duties for n in range(rng.randrange(4))]
    at = 0.0
    for _ in range(2):
        at += rng.choice([0.1, 1.0, 2.5])
        for _ in range(rng.choice([0, 0, 1, 30])):
            counts.request(
                rng.expovariate(2), rng.expovariate(1), rng.expovariate(0.1), rng.randrange(5000), rng.randrange(1, 9)
            )
        counts.metrics.waiting_requests.set(rng.randrange(5))
        rows = [_next(rng, row) for row in rows if rng.random() > 0.1]
        polls.append({"at": at, "status": status(*rows, decode=rng.randrange(4)), "metrics": counts.text()})
    return polls


def _next(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """What a worker says a while later."""
    if rng.random() < 0.1:
        return unheard(row["worker_id"], epoch=row["epoch"] + 1)
    looked_up = rng.randrange(100)
    return row | {
        "state": rng.choice(["ready", "ready", "draining"]),
        "running": rng.randrange(9),
        "waiting": rng.randrange(9),
        "busy_s": (row["busy_s"] or 0.0) + rng.random() * 3,
        "step_age_s": rng.choice([0.0, rng.random()]),
        "prefix_cache_queries": (row["prefix_cache_queries"] or 0) + looked_up,
        "prefix_cache_hits": (row["prefix_cache_hits"] or 0) + rng.randrange(looked_up + 1),
    }
