"""A short answer beside more long ones than a step holds: `python -m benchmarks.seats`, which starts clusters of its own, on an
idle machine.

    64 long answers run ──► short ones, one after the other, of the same tenant and of another
    150 long answers run ──► the same        ... each with a pool that holds all 150, and with one that holds half of them

What counts is how long a short answer takes, from the request to its last token: the median beside 150, divided by the median
beside 64 of the same tenant kind and pool. Long answers are dropped when the short ones are over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.servers import HOST, cluster
from cluster.commands.lib.key_file import add_key

FEW, MANY = 64, 150
"""Long answers: as many as a step holds, and more."""
PROMPT_TOKENS, LONG_TOKENS, SHORT_TOKENS = 32, 600, 20
BLOCK_TOKENS = 16
POOLS = {"all": MANY, "half": MANY // 2}
"""Number of long answers that the decode worker's pool holds."""
LIMITS = {"other": 3.0, "same": 6.0}
"""Times that a short answer may take beside MANY what it takes beside FEW, by its tenant: another one, or that of the crowd."""
FEW_S, MANY_S = 30.0, 240.0
"""Seconds for which short answers are measured. Beside MANY, the first long answers end before that is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS))
    given = parser.parse_args()
    result = {name: measured(given.port, POOLS[name]) for name in given.pools}
    write_result("seats", result, table(result))
    for found in result.values():
        assert not found["leaks"]
        assert all(found["ratio"][who] <= limit for who, limit in LIMITS.items())


def measured(port: int, num_answers: int) -> dict[str, Any]:
    """What was found on a fresh cluster whose decode worker's pool holds so many long answers."""
    pool_tokens = num_answers * -(-(PROMPT_TOKENS + LONG_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        keys, config = Path(folder) / "keys.json", Path(folder) / "cluster.yaml"
        bearers = {tenant: add_key(keys, {"tenant": tenant}) for tenant in ("same", "other")}
        config.write_text(f"http: {{keys_file: {keys}, admin_key: operator}}\ndecode: {{kv_cache_tokens: {pool_tokens}}}\n")
        with cluster(port, "--config", str(config)):
            return asyncio.run(measure(f"http://{HOST}:{port}", bearers))


async def measure(url: str, bearers: dict[str, str]) -> dict[str, Any]:
    """Seconds of each short answer beside FEW and MANY long ones, and what became of the pool meanwhile."""
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        for tenant in bearers:
            await short_s(http, rng, bearers[tenant])  # to warm up
        few = await beside(http, rng, bearers, FEW, FEW_S)
        many = await beside(http, rng, bearers, MANY, MANY_S)
        admin = {"authorization": "Bearer operator"}
        await idle(http, admin)
        leaks = (await http.get("/admin/audit", headers=admin)).json()["leaks"]
    medians = [{who: statistics.median(times) for who, times in took.items()} for took in (few["short_s"], many["short_s"])]
    ratio = {who: medians[1][who] / medians[0][who] for who in bearers}
    worst = {who: max(many["short_s"][who]) / medians[0][who] for who in bearers}
    print(f"medians {medians}, ratio {ratio}, worst {worst}", flush=True)
    return {"few": few, "many": many, "ratio": ratio, "worst": worst, "leaks": leaks}


async def beside(
    http: httpx.AsyncClient, rng: random.Random, bearers: dict[str, str], count: int, seconds: float
) -> dict[str, Any]:
    """Measure short answers, of both tenants in turns, while `count` long ones run, for so long or until half of them ended."""
    took: dict[str, list[float]] = {who: [] for who in bearers}
    async with long_answers(http, rng, bearers["same"], count) as tokens:
        before, began = await counted(http), time.perf_counter()
        tokens_before = sum(tokens)
        while time.perf_counter() - began < seconds and sum(each >= LONG_TOKENS for each in tokens) < count / 2:
            for who, bearer in bearers.items():
                took[who].append(await short_s(http, rng, bearer))
        passed, after = time.perf_counter() - began, await counted(http)
        tokens_per_s = (sum(tokens) - tokens_before) / passed
    return {"short_s": took, "long_tokens_per_s": tokens_per_s, **{name: after[name] - before[name] for name in after}}


@asynccontextmanager
async def long_answers(http: httpx.AsyncClient, rng: random.Random, bearer: str, count: int) -> AsyncIterator[list[int]]:
    """Long answers, each of which has begun; yields how many tokens each has got so far. Those that still run are dropped."""
    tokens = [0] * count

    async def one(number: int) -> None:
        while True:
            async with asked(http, rng, LONG_TOKENS, bearer) as answer:
                if answer.status_code == 429:
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                    continue
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        tokens[number] += len(json.loads(line[6:])["choices"][0]["token_ids"])
                return

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    try:
        while not all(tokens):
            await asyncio.sleep(0.1)
            for task in tasks:
                if task.done():
                    task.result()
        yield tokens
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def short_s(http: httpx.AsyncClient, rng: random.Random, bearer: str) -> float:
    """Seconds that one short streamed answer takes, waits for room included."""
    began = time.perf_counter()
    async with asked(http, rng, SHORT_TOKENS, bearer) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_lines():
            pass
    return time.perf_counter() - began


async def counted(http: httpx.AsyncClient) -> dict[str, float]:
    """Preemptions and tokens that were computed again, since the start."""
    names = {"tandem:num_preemptions_total": "preemptions", "tandem:recomputed_tokens_total": "recomputed_tokens"}
    found = dict.fromkeys(names.values(), 0.0)
    for line in (await http.get("/metrics")).text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            found[names[name]] += float(line.rpartition(" ")[2])
    return found


async def idle(http: httpx.AsyncClient, admin: dict[str, str]) -> None:
    """Wait until no worker has a ticket."""
    deadline = time.monotonic() + 60
    while any(worker["tickets"] for worker in (await http.get("/admin/status", headers=admin)).json()["workers"]):
        assert time.monotonic() < deadline, "tickets are held"
        await asyncio.sleep(0.2)


def asked(
    http: httpx.AsyncClient, rng: random.Random, max_tokens: int, bearer: str
) -> AbstractAsyncContextManager[httpx.Response]:
    """A streamed answer of just so many tokens."""
    body = {
        "model": "smollm2",
        "prompt": [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return http.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {bearer}"})


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rows = [
        "# A short answer beside more long ones than a step holds",
        "",
        f"{SHORT_TOKENS} tokens beside answers of {LONG_TOKENS}, prompts of {PROMPT_TOKENS}; a step holds 64. Medians, from "
        "the request to the last token.",
        "",
        f"| the pool holds | the short answer is of | beside {FEW} | beside {MANY} | ratio | worst ratio | allowed |",
        "|---|---|---|---|---|---|---|",
    ]
    for pool, found in result.items():
        for who, limit in LIMITS.items():
            few, many = (statistics.median(found[beside]["short_s"][who]) for beside in ("few", "many"))
            tenant = "the same tenant" if who == "same" else "another tenant"
            ratios = f"{found['ratio'][who]:.2f} | {found['worst'][who]:.2f}"
            rows.append(f"| {pool} | {tenant} | {few:.2f} s | {many:.2f} s | {ratios} | {limit:g} |")
    rows += [
        "",
        "| the pool holds | long answers | their tokens/s | preemptions | tokens computed again |",
        "|---|---|---|---|---|",
    ]
    for pool, found in result.items():
        for name, count in (("few", FEW), ("many", MANY)):
            row = found[name]
            counts = f"{row['preemptions']:.0f} | {row['recomputed_tokens']:.0f}"
            rows.append(f"| {pool} | {count} | {row['long_tokens_per_s']:.0f} | {counts} |")
    rows += ["", "The worst ratio is that of the slowest short answer. Command: `python -m benchmarks.seats`"]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
