"""Does a large cluster stay right while its parts fail? `python -m benchmarks.paced_kills --traces DIR`, on an idle machine.

A paced cluster of 16 prefill and 16 decode workers (docs/paced.md) with a memory tier gets Mooncake's conversations at their
own pace, for 20 minutes. Every 20 s a process of eight workers is killed, or all connections of one worker are cut. Each token
of each answer must be the one that the prompt's tokens say, an audit at the end must find nothing, and the memory of routers
must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.harm import cut_worker, kill
from benchmarks.lib.processes import pss_bytes, tree
from benchmarks.lib.servers import HOST, MODEL, cluster
from configs.models import resolve
from engine.paced.fingerprints import next_token
from loadtest.datasets import TraceRow, mooncake_rows
from protocol.cache.keys import SHORT_BYTES

WORKERS, BLOCK_SIZE, TRACE_BLOCK = 16, 16, 512
TRACE = "mooncake_conversation.jsonl"
MINUTES, HARM_S, CALM_S, LOOK_S = 20.0, 20.0, 60.0, 15.0
MOST_TOKENS = 200
"""Of an answer: so more of the time goes into what is checked here, prompts and their KV."""
TIMEOUT_S = 300.0


@dataclass
class Asked:
    """One request of the trace, and what became of it."""

    row: TraceRow
    answer: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def num_tokens(self) -> int:
        return min(self.row.output_len, MOST_TOKENS)


@dataclass
class Seen:
    """What was noted while the load ran."""

    harm: Counter[str] = field(default_factory=Counter)
    router_bytes: list[float] = field(default_factory=list)
    leaks: list[list[dict[str, Any]]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--traces", type=Path, required=True, help="the folder that has Mooncake's trace")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--time-scale", type=float, default=1.0, help="the trace's times, multiplied by it")
    given = parser.parse_args()
    rows = [row for row in mooncake_rows(given.traces / TRACE) if row.arrival_s * given.time_scale < given.minutes * 60]
    flags = ("--engine", "paced", "--prefill", str(WORKERS), "--decode", str(WORKERS), "--kv-offloading-size", "256")
    with cluster(given.port, *flags) as pid:
        asked, seen, after = asyncio.run(run(given.port, pid, rows, given.time_scale))
    wrong = [one for one in asked if one.failure is None and not is_right(one)]
    result = {
        "minutes": given.minutes,
        "time_scale": given.time_scale,
        "requests": len(asked),
        "failures": Counter(one.failure for one in asked if one.failure),
        "wrong": len(wrong),
        "tokens": sum(len(one.answer) for one in asked),
        "harm": seen.harm,
        "leaks": [leak for leaks in seen.leaks for leak in leaks],
        "audits": len(seen.leaks),
        "router_bytes": seen.router_bytes,
        **after,
    }
    write_result("paced_kills", result, table(result))


async def run(port: int, pid: int, rows: Sequence[TraceRow], time_scale: float) -> tuple[list[Asked], Seen, dict[str, float]]:
    """Everything that was asked, what was noted, and the cluster's own counts at the end."""
    asked, seen = [Asked(row) for row in rows], Seen()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=TIMEOUT_S, limits=limits) as client:
        harming = asyncio.create_task(harm(client, seen))
        looking = asyncio.create_task(look(pid, seen))
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for one in asked:
                await asyncio.sleep(max(0.0, began + one.row.arrival_s * time_scale - time.monotonic()))
                tasks.create_task(ask(client, one))
        for task in (harming, looking):
            task.cancel()
        await asyncio.gather(harming, looking, return_exceptions=True)
        await asyncio.sleep(CALM_S)
        seen.leaks.append(await audit(client))
        names = ("resumed_streams_total", "kv_transfer_failures_total", "cache_news_total", "cache_news_keys_total")
        lines = (await client.get("/metrics")).text.splitlines()
    hits = {f"hits_{source}": counted(lines, "prefix_cache_hits_total", f'source="{source}"') for source in SOURCES}
    return asked, seen, {name: counted(lines, name) for name in names} | hits


SOURCES = ("pool", "peer", "memory")


def counted(lines: Sequence[str], name: str, label: str = "") -> float:
    found = (line for line in lines if line.startswith((f"tandem:{name}{{", f"tandem:{name} ")) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def ask(client: httpx.AsyncClient, one: Asked) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt_of(one.row),
        "max_tokens": one.num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                one.failure = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        one.failure = str(event["error"])[:200]
                        return
                    for choice in event["choices"]:
                        one.answer += choice.get("token_ids") or []
    except httpx.HTTPError as error:
        one.failure = type(error).__name__


async def harm(client: httpx.AsyncClient, seen: Seen) -> None:
    """A kill or a cut every HARM_S, one after the other."""
    rng = random.Random(1)
    for number in range(10_000):
        await asyncio.sleep(HARM_S)
        try:
            workers = (await client.get("/admin/status")).json()["workers"]
        except (httpx.HTTPError, json.JSONDecodeError):
            continue
        pids = sorted({worker["pid"] for worker in workers if worker["state"] == "ready" and worker["pid"]})
        if not pids:
            continue
        if number % 2:
            seen.harm["processes of eight workers killed"] += 1
            kill(rng.choice(pids))
        elif cut_worker(rng.choice(pids), rng):
            seen.harm["workers whose connections were cut"] += 1


async def look(pid: int, seen: Seen) -> None:
    """The memory of the routers, again and again."""
    while True:
        await asyncio.sleep(LOOK_S)
        routers = [each for each in tree(pid) if is_router(each)]
        seen.router_bytes.append(sum(pss_bytes(each) for each in routers) / max(1, len(routers)))


def is_router(pid: int) -> bool:
    try:
        return b"ServeReplica" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def audit(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    leaks: list[dict[str, Any]] = (await client.get("/admin/audit")).json()["leaks"]
    return leaks


@cache
def block(hash_id: int) -> tuple[int, ...]:
    rng = random.Random(hash_id)
    return tuple(rng.randrange(100, 40_000) for _ in range(TRACE_BLOCK))


def prompt_of(row: TraceRow) -> list[int]:
    return [token_id for hash_id in row.hash_ids for token_id in block(hash_id)][: row.input_len]


def is_right(one: Asked) -> bool:
    """Whether each token is the one that all tokens before it say."""
    tokens = prompt_of(one.row)
    return len(one.answer) == one.num_tokens and all(
        one.answer[i] == token for i, token in enumerate(said(tokens, one.num_tokens))
    )


def said(tokens: list[int], count: int) -> Iterator[int]:
    facts = resolve(MODEL).facts
    for _ in range(count):
        tokens.append(next_token(tokens, facts, BLOCK_SIZE))
        yield tokens[-1]


def table(result: dict[str, Any]) -> str:
    seconds = result["minutes"] * 60
    mib = [each / 2**20 for each in result["router_bytes"]]
    quarter = max(1, len(mib) // 4)
    early, late = statistics.median(mib[quarter : 2 * quarter] or mib), statistics.median(mib[-quarter:])
    harm = ", ".join(f"{count} {what}" for what, count in result["harm"].items())
    failures = ", ".join(f"{count} x {what}" for what, count in result["failures"].items()) or "none"
    lines = [
        "# A large paced cluster under failures",
        "",
        f"{WORKERS} prefill and {WORKERS} decode workers, {result['minutes']:g} minutes of Mooncake's conversations (times x "
        f"{result['time_scale']:g}), answers of up to {MOST_TOKENS} tokens. {harm}.",
        "",
        "| what | number |",
        "|---|---|",
        f"| requests | {result['requests']} |",
        f"| failed | {sum(result['failures'].values())} ({failures}) |",
        f"| tokens of answers, all checked | {result['tokens']} |",
        f"| answers with a wrong token | {result['wrong']} |",
        f"| streams that went on elsewhere | {result['resumed_streams_total']:.0f} |",
        f"| tokens of prompts not computed: pool, peer, memory | "
        f"{result['hits_pool']:.0f}, {result['hits_peer']:.0f}, {result['hits_memory']:.0f} |",
        f"| news of caches to the router | {result['cache_news_total'] / seconds:.1f} messages/s, "
        f"{result['cache_news_keys_total'] * SHORT_BYTES / seconds / 1e3:.1f} kB/s of keys |",
        f"| leaks found by the audit at the end | {len(result['leaks'])} |",
        f"| memory of a router, second quarter and last | {early:.0f}, {late:.0f} MiB |",
        "",
        "Command: `python -m benchmarks.paced_kills --traces DIR`",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
