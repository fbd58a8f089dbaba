"""Clients that leave: `python -m benchmarks.cut_streams`, which starts a cluster of its own.

1,000 streams, 16 at a time, of which the client cuts 30 %, each at a random moment: while it waits, while its prompt is
computed, or while it gets tokens. Afterwards no worker may hold anything for any of them, and the cluster's processes may not
have grown by more than 5 % since the first 200. Memory is PSS: what a process has for itself, and its share of what it has with
others. The KV pools are memory too: they are touched as they are first used and then kept as a cache, so they are small here,
and prompts fill them once before anything is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.processes import pss_bytes, tree
from benchmarks.lib.servers import HOST, cluster

POOL_TOKENS = 4096
CONFIG = f"max_model_len: 1024\nprefill: {{kv_cache_tokens: {POOL_TOKENS}}}\ndecode: {{kv_cache_tokens: {POOL_TOKENS}}}\n"
AT_A_TIME = 16
CUT_SHARE = 0.3
PROMPT_TOKENS, ANSWER_TOKENS = 48, 24
GROWTH_LIMIT = 0.05
_IDLE_S = 30.0
_BY_NAME = {"ray::ServeRepl": "router", "ray::Controller": "controller", "haproxy": "HAProxy"}
"""What the kernel calls them, which is 15 characters long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--first", type=int, default=200, help="memory is compared with what it was after these")
    given = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(CONFIG)
        config.flush()
        with cluster(given.port, "--config", config.name) as pid:
            url = f"http://{HOST}:{given.port}"
            outcome = asyncio.run(cut_streams(url, pid, given.streams, given.first))
    result = dataclasses.asdict(outcome) | {"growth": outcome.growth, "streams": given.streams, "first": given.first}
    write_result("cut_streams", result, table(outcome, given.first))
    assert not outcome.leaks
    assert max(outcome.growth.values()) <= GROWTH_LIMIT


def table(outcome: Outcome, first: int) -> str:
    counts = ", ".join(f"{number} {status}" for status, number in sorted(outcome.statuses.items()))
    rows = [f"{counts}; leaks found by the audit: {len(outcome.leaks)}", ""]
    rows += [f"| memory (PSS) | after {first} | at the end | growth |", "|---|---|---|---|"]
    for kind, growth in outcome.growth.items():
        before, after = (sizes[kind] / 2**20 for sizes in (outcome.early, outcome.late))
        rows.append(f"| {kind} | {before:.1f} MiB | {after:.1f} MiB | {growth:+.1%} |")
    return "\n".join(rows)


@dataclass(frozen=True)
class Outcome:
    """What became of the streams, and the memory of each kind of process in bytes, after the first ones and at the end."""

    statuses: Mapping[str, int]
    early: Mapping[str, int]
    late: Mapping[str, int]
    leaks: list[Any]

    @property
    def growth(self) -> dict[str, float]:
        """Share by which each kind of process grew."""
        return {kind: self.late[kind] / size - 1 for kind, size in self.early.items()}


async def cut_streams(url: str, root_pid: int, streams: int, first: int, seed: int = 0) -> Outcome:
    """`streams` of them, on a cluster whose pools hold POOL_TOKENS. Raises AssertionError if workers do not become idle."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await _fill_pools(http, rng)
        usual_s = statistics.median([await _usual_s(http, rng) for _ in range(5)])
        statuses: Counter[str] = Counter()
        await _run(http, rng, first, usual_s, statuses)
        await _idle(http)
        early = await memory(http, root_pid)
        await _run(http, rng, streams - first, usual_s, statuses)
        await _idle(http)
        late = await memory(http, root_pid)
        leaks = (await http.get("/admin/audit")).json()["leaks"]
    return Outcome(statuses=dict(statuses), early=early, late=late, leaks=leaks)


async def memory(http: httpx.AsyncClient, root_pid: int) -> dict[str, int]:
    """PSS of the processes that requests pass through, of all below `root_pid`, by what they are, in bytes."""
    workers = (await http.get("/admin/status")).json()["workers"]
    kinds = {pid: f"{worker['role']} worker" for worker in workers for pid in worker["rank_pids"]}
    found: Counter[str] = Counter()
    for pid, name in tree(root_pid).items():
        kind = kinds.get(pid) or next((kind for start, kind in _BY_NAME.items() if name.startswith(start)), None)
        if kind is not None:
            found[kind] += pss_bytes(pid)
    return dict(found)


async def _run(http: httpx.AsyncClient, rng: random.Random, streams: int, usual_s: float, statuses: Counter[str]) -> None:
    """So many streams, AT_A_TIME at a time."""
    left = iter([rng.uniform(0, usual_s) if rng.random() < CUT_SHARE else None for _ in range(streams)])

    async def sender() -> None:
        for cut_s in left:
            statuses[await _stream(http, rng, cut_s)] += 1

    async with asyncio.TaskGroup() as senders:
        for _ in range(AT_A_TIME):
            senders.create_task(sender())


async def _stream(http: httpx.AsyncClient, rng: random.Random, cut_s: float | None) -> str:
    try:
        async with asyncio.timeout(cut_s), http.stream("POST", "/v1/completions", json=_body(rng, PROMPT_TOKENS)) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    except TimeoutError:
        return "cut"
    return "whole" if answer.status_code == 200 and lines[-1] == "data: [DONE]" else f"status {answer.status_code}"


async def _usual_s(http: httpx.AsyncClient, rng: random.Random) -> float:
    begun = time.perf_counter()
    assert await _stream(http, rng, None) == "whole"
    return time.perf_counter() - begun


async def _fill_pools(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Every block of both pools is used, and with them what a large batch needs."""
    size = POOL_TOKENS // 8
    answers = await asyncio.gather(
        *(http.post("/v1/completions", json=_body(rng, size) | {"stream": False}) for _ in range(20))
    )
    assert {answer.status_code for answer in answers} == {200}


async def _idle(http: httpx.AsyncClient) -> None:
    """Wait until no worker has anything to do, which only they can tell."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        workers = (await http.get("/admin/status")).json()["workers"]
        if all(w["tickets"] == w["running"] == w["waiting"] == w["transfers"] == 0 for w in workers) and all(
            w["free_blocks"] == w["total_blocks"] for w in workers
        ):
            return
        assert time.monotonic() < deadline, f"still held: {workers}"
        await asyncio.sleep(0.2)


def _body(rng: random.Random, prompt_tokens: int) -> dict[str, Any]:
    prompt = [rng.randrange(100, 40_000) for _ in range(prompt_tokens)]
    return {"model": "smollm2", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}


if __name__ == "__main__":
    main()
