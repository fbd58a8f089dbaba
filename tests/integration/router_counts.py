"""What each router of a cluster has counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


def counted(cluster: Any) -> dict[str, defaultdict[str, float]]:
    """One scrape: what each router has counted, by the metric's name."""
    found: dict[str, defaultdict[str, float]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics", timeout=30).text):
        for sample in family.samples:
            if "router" in sample.labels:
                found.setdefault(sample.name, defaultdict(float))[sample.labels["router"]] += sample.value
    return found


def wait_for_routers(cluster: Any, number: int, headers: dict[str, str] | None = None) -> None:
    """Wait until HAProxy sends requests to so many routers: it learns of the second one a moment after the first one serves.

    It prefers the one with the fewest, so several are asked at once.
    """
    name, body = "tandem:request_success_total", {"model": "smollm2", "prompt": [5], "max_tokens": 50, "ignore_eos": True}
    before: Mapping[str, float] = counted(cluster).get(name, {})

    def ask(_: int) -> None:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    def asked() -> bool:
        with ThreadPoolExecutor(2 * number) as threads:
            list(threads.map(ask, range(2 * number)))
        return sum(count > before.get(router, 0) for router, count in counted(cluster)[name].items()) == number

    cluster.until(asked, 60)
