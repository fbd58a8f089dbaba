"""A tenant that floods, and another one: `python -m benchmarks.flood`, which starts a cluster of its own, on an idle machine.

In turns: the other tenant's requests alone, one after the other, and the same while the first tenant sends 100 at once, and 100
more whenever these are answered. What counts is the other's time to first token, 95th percentile. The line holds fewer than
100, so that some of the flood is refused: with a 429 that says when to try again. Everybody else gets an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.servers import HOST, cluster
from cluster.commands.lib.key_file import add_key

FLOOD, LINE = 100, 90
REQUESTS = 24
"""Of the other tenant, in each phase."""
PROMPT_TOKENS, ANSWER_TOKENS = 128, 16
LIMIT = 2.0


@dataclass
class Flood:
    """What became of the first tenant's requests."""

    answered_s: list[float] = field(default_factory=list)
    """How long each took."""
    retry_after_s: list[int] = field(default_factory=list)
    """Of those that were refused."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, config = Path(folder) / "keys.json", Path(folder) / "cluster.yaml"
        flooding, other = (add_key(keys, {"tenant": tenant}) for tenant in ("flooding", "other"))
        config.write_text(f"http: {{keys_file: {keys}}}\nlimits: {{max_waiting_requests: {LINE}}}\n")
        with cluster(given.port, "--config", str(config)):
            result = asyncio.run(measure(f"http://{HOST}:{given.port}", flooding, other, given.rounds))
    write_result("flood", result, table(result))
    assert result["ratio"] <= LIMIT


async def measure(url: str, flooding: str, other: str, rounds: int) -> dict[str, Any]:
    """p95 of the other's TTFT of each round, in ms, and what became of the flood. One round before is to warm up."""
    rng = random.Random(0)
    flood = Flood()
    quiet_ms, flooded_ms = [], []
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, limits=limits, headers=_bearer(flooding)) as crowd,
        httpx.AsyncClient(base_url=url, timeout=300, headers=_bearer(other)) as one,
    ):
        for number in range(rounds + 1):
            quiet = [await _ttft_s(one, rng) for _ in range(REQUESTS)]
            flooded = await _flooded(crowd, one, rng, flood)
            if number:
                quiet_ms.append(_p95_ms(quiet))
                flooded_ms.append(_p95_ms(flooded))
    return {
        "quiet_p95_ms": quiet_ms,
        "flooded_p95_ms": flooded_ms,
        "ratio": statistics.median(flooded / quiet for quiet, flooded in zip(quiet_ms, flooded_ms, strict=True)),
        "flood_answered": len(flood.answered_s),
        "flood_longest_s": max(flood.answered_s),
        "flood_refused": len(flood.retry_after_s),
        "retry_after_s": sorted(set(flood.retry_after_s)),
    }


async def _flooded(crowd: httpx.AsyncClient, one: httpx.AsyncClient, rng: random.Random, flood: Flood) -> list[float]:
    """TTFT of the other's requests, all of them sent while the flood goes on; returns when that is answered too."""
    enough = asyncio.Event()

    async def keep_flooding() -> None:
        while not enough.is_set():
            async with asyncio.TaskGroup() as burst:
                for _ in range(FLOOD):
                    burst.create_task(_one_of_many(crowd, rng, flood))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_flooding())
        try:
            return [await _ttft_s(one, rng) for _ in range(REQUESTS)]
        finally:
            enough.set()


async def _one_of_many(crowd: httpx.AsyncClient, rng: random.Random, flood: Flood) -> None:
    begun = time.perf_counter()
    answer = await crowd.post("/v1/completions", json=_body(rng))
    if answer.status_code == 429:
        flood.retry_after_s.append(int(answer.headers["retry-after"]))
    else:
        answer.raise_for_status()
        flood.answered_s.append(time.perf_counter() - begun)


async def _ttft_s(one: httpx.AsyncClient, rng: random.Random) -> float:
    """Of one streamed request, which is read to its end."""
    begun, ttft_s = time.perf_counter(), None
    async with one.stream("POST", "/v1/completions", json=_body(rng) | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if ttft_s is None and line:
                ttft_s = time.perf_counter() - begun
    assert ttft_s is not None
    return ttft_s


def _body(rng: random.Random) -> dict[str, Any]:
    prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    return {"model": "smollm2", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _p95_ms(times_s: Sequence[float]) -> float:
    return 1000 * sorted(times_s)[math.ceil(0.95 * len(times_s)) - 1]


def table(result: dict[str, Any]) -> str:
    rows = [
        f"One tenant sends {FLOOD} requests at once, again and again; {PROMPT_TOKENS} tokens in, {ANSWER_TOKENS} out",
        "",
        "| the other tenant's p95 TTFT | alone | during the flood | ratio |",
        "|---|---|---|---|",
    ]
    for number, (quiet, flooded) in enumerate(zip(result["quiet_p95_ms"], result["flooded_p95_ms"], strict=True), start=1):
        rows.append(f"| round {number} | {quiet:.0f} ms | {flooded:.0f} ms | {flooded / quiet:.2f} |")
    quiet, flooded = (statistics.median(result[name]) for name in ("quiet_p95_ms", "flooded_p95_ms"))
    rows.append(f"| median | {quiet:.0f} ms | {flooded:.0f} ms | {result['ratio']:.2f} |")
    waits = ", ".join(str(each) for each in result["retry_after_s"])
    rows += [
        "",
        f"Of the flood, {result['flood_answered']} requests were answered, each within {result['flood_longest_s']:.0f} s, and "
        f"{result['flood_refused']} refused, with a Retry-After of {waits} s.",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
