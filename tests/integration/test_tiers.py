"""`--kv-offloading-dir` with a real cluster: what was computed is read back after everything was killed, and says the same."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(300)]


def ask(served: Any, token_ids: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were not computed."""
    body = {"model": "smollm2", "prompt": token_ids, "max_tokens": 12, "return_token_ids": True, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(served: Any, name: str, **labels: str) -> float:
    lines = [line for line in httpx.get(f"{served.url}/metrics", timeout=30).text.splitlines() if line.startswith(f"{name}{{")]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))


def test_the_disk_tier_outlives_a_cluster_whose_processes_are_killed(launch: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--kv-offloading-dir", str(tmp_path / "kv"), "--kv-offloading-disk-size", "1", "--kv-offloading-size", "0.5")
    first = launch(*flags)
    first.wait_ready()
    answers = [ask(first, prompt(seed)) for seed in range(3)]
    assert all(cached == 0 for _, cached in answers)
    first.until(lambda: metric(first, "tandem:kv_tier_stored_blocks_total", tier="disk") >= 3 * 18, 20)
    for worker in first.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    first.until(lambda: first.settled(1, 1) and all(worker["epoch"] > 1 for worker in first.workers()), 90)
    assert [ask(first, prompt(seed)) for seed in range(3)] == [(tokens, 288) for tokens, _ in answers]
    assert (
        metric(first, "tandem:prefix_cache_hits_total", source="memory")
        + metric(first, "tandem:prefix_cache_hits_total", source="disk")
        == 3 * 288
    )
    first.end()

    second = launch(*flags)
    second.wait_ready()
    assert [ask(second, prompt(seed)) for seed in range(3)] == [(tokens, 288) for tokens, _ in answers]
    assert metric(second, "tandem:prefix_cache_hits_total", source="disk") == 3 * 288
    second.until(second.clean, 20)
    erased = httpx.post(f"{second.url}/admin/cache", json={"action": "reset"}, timeout=60)
    assert erased.status_code == 200, erased.text
    assert sum(worker["tier_blocks"] for worker in erased.json()["workers"]) > 0
    assert [ask(second, prompt(seed)) for seed in range(3)] == answers
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
