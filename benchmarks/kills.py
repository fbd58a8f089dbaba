"""Do streams survive killed decode workers, and how long do clients wait? `python -m benchmarks.kills`, on an idle machine.

A real cluster with two decode workers and the default model. Sixteen streams run at a time, each followed by the next, and
again and again one of the decode workers that have some is killed (SIGKILL): two to five seconds after both are up and every
stream has gone on, so that a gap is that of one kill, and the streams of a worker that has just come up have had their time to
be copied. Before, the same requests run undisturbed. Every answer must be the undisturbed one: token ids, text, finish reason,
logprobs. Where the operators keep one arithmetic (docs/engine.md) that holds for all. Elsewhere a re-computed KV cache is
rounded differently, and the share of answers that differ is what is measured. Each kind of processor has a result file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.journal import Journal, add_state, journal_of
from benchmarks.lib.lanes import Lanes
from benchmarks.lib.quantiles import quantile
from benchmarks.lib.servers import HOST, cluster
from benchmarks.lib.streams import Answered, Request

STREAMS = 16
DIFFERENT = 32
MAX_TOKENS = 200
START_S = 180.0
CALM_S = (2.0, 5.0)
"""Before a kill, from when both workers are up and every stream has gone on."""
CONFIG = "prefill: {kv_cache_tokens: 16384}\ndecode: {workers: 2, kv_cache_tokens: 16384}\n"


@dataclass(frozen=True)
class Run:
    """`kills` kills while requests of these kinds run."""

    name: str
    kinds: tuple[str, ...]
    kills: int


RUNS = {
    "bfloat16": (
        Run("greedy", ("greedy",), 80),
        Run("seeded sampling", ("seeded",), 40),
        Run("JSON schema", ("schema",), 30),
        Run("tools", ("tools",), 20),
        Run("penalties, choices, stop strings", ("penalties", "choices", "stop"), 30),
    ),
    "float32": (Run("all of these, float32", ("greedy", "seeded", "schema", "tools", "penalties", "choices", "stop"), 20),),
}
"""By dtype; bfloat16 is what `auto` takes where it can be multiplied."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the kills")
    add_state(parser)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.port, options.scale, journal_of(parser, options)))
    write_result(f"kills_{operators()}", {"streams": STREAMS, "runs": rows}, table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| requests | kills | streams | finished | exact | resumed | pause p50 | p99 of all | max | undisturbed max |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gaps = row["longest_gaps_s"]
        pause_s = statistics.median(pauses(row))
        numbers = [row["kills"], row["streams"], row["finished"], row["exact"], row["resumed"]]
        times = [pause_s, quantile(gaps), max(gaps), max(row["undisturbed_gaps_s"])]
        cells = [row["name"], *map(str, numbers), *(f"{seconds:.2f} s" for seconds in times)]
        lines.append(f"| {' | '.join(cells)} |")
    differing = [f"- {row['name']}: {each}" for row in rows for each in row["differences"]]
    return "\n".join(
        [
            *lines,
            "",
            f"{STREAMS} streams of up to {MAX_TOKENS} tokens at a time. Times are the longest between two events of a stream:",
            "the median of as many of them as streams were resumed, the longest ones, and p99 and maximum of all.",
            *differing,
        ]
    )


def pauses(row: dict[str, Any]) -> list[float]:
    """The longest gaps, in seconds, of as many streams as were resumed: those of the others say nothing of kills."""
    return sorted(row["longest_gaps_s"], reverse=True)[: max(1, row["resumed"])]


async def measure(port: int, scale: float, journal: Journal) -> list[dict[str, Any]]:
    """One row for each run, each dtype on a cluster of its own at `port`. `scale` multiplies the numbers of kills."""
    rows = []
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(CONFIG)
        config.flush()
        for dtype, runs in RUNS.items():
            with cluster(port, "--config", config.name, "--dtype", dtype):
                rows += await measure_runs(port, runs, scale, journal)
    return rows


async def measure_runs(port: int, runs: Iterable[Run], scale: float, journal: Journal) -> list[dict[str, Any]]:
    """One row for each run on the cluster at `port`, printed as soon as it is known."""
    rows = []
    limits = httpx.Limits(max_connections=4 * STREAMS)
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=300, limits=limits) as client:
        await until_up(client)
        for run in runs:
            kills = max(1, round(run.kills * scale))
            rows.append(await journal.once_awaited(run.name, partial(one_run, client, run, kills)))
            print(table(rows[-1:]), flush=True)
    return rows


async def one_run(client: httpx.AsyncClient, run: Run, kills: int) -> dict[str, Any]:
    requests = [Request(run.kinds[n % len(run.kinds)], n, MAX_TOKENS) for n in range(DIFFERENT)]
    undisturbed = await answered(client, requests)
    assert all(answer.failure is None for answer in undisturbed), [answer.failure for answer in undisturbed]
    expected = {answer.request: answer for answer in undisturbed}
    resumed = await counted(client, "resumed_streams_total")
    answers = await disturbed(client, requests, kills, random.Random(run.name))
    differences = [
        f"request {answer.request.number}: {answer.failure or difference}"
        for answer in answers
        if (difference := answer.differs(expected[answer.request])) or answer.failure
    ]
    return {
        "name": run.name,
        "kills": kills,
        "streams": len(answers),
        "finished": sum(answer.failure is None for answer in answers),
        "exact": len(answers) - len(differences),
        "resumed": int(await counted(client, "resumed_streams_total") - resumed),
        "differences": differences,
        "longest_gaps_s": [answer.longest_gap() for answer in answers],
        "undisturbed_gaps_s": [answer.longest_gap() for answer in undisturbed],
        "leaks": (await client.get("/admin/audit")).json()["leaks"],
    }


async def answered(client: httpx.AsyncClient, requests: Sequence[Request]) -> list[Answered]:
    """Each request once, STREAMS at a time."""
    slots = asyncio.Semaphore(STREAMS)

    async def one(request: Request) -> Answered:
        async with slots:
            return await Answered(request).run(client)

    return list(await asyncio.gather(*(one(request) for request in requests)))


async def disturbed(client: httpx.AsyncClient, requests: Sequence[Request], kills: int, rng: random.Random) -> list[Answered]:
    """The answers of a load under which this many decode workers are killed; all of it runs to its end."""
    load = Lanes(client, requests)
    async with asyncio.TaskGroup() as tasks:
        for lane in range(STREAMS):
            tasks.create_task(load.lane(lane))
        killed: set[int] = set()
        for number in range(kills):
            await until_up(client, killed)
            await load.until_flowing(START_S)
            await asyncio.sleep(rng.uniform(*CALM_S))
            pid, whom = await kill_one(client, rng)
            killed.add(pid)
            print(f"kill {number + 1} of {kills}: {whom}", flush=True)
        load.over = True
    return load.answers


async def kill_one(client: httpx.AsyncClient, rng: random.Random) -> tuple[int, str]:
    """SIGKILL for a decode worker that has streams, when all are up: its process, and who it was."""
    async with asyncio.timeout(START_S):
        while True:
            workers = await decode_workers(client)
            busy = [worker for worker in workers if worker["running"]]
            if busy and all(worker["running"] is not None for worker in workers):
                victim = rng.choice(busy)
                os.kill(victim["pid"], signal.SIGKILL)
                return victim["pid"], f"{victim['worker_id']} with {victim['running']} streams"
            await asyncio.sleep(0.05)


async def decode_workers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    workers = (await client.get("/admin/status")).json()["workers"]
    return [worker for worker in workers if worker["role"] == "decode"]


async def counted(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tandem:{name}"))


async def until_up(client: httpx.AsyncClient, killed: Collection[int] = ()) -> None:
    """Both decode workers, neither of them one of these processes: right after a kill the status may not show it yet."""
    async with asyncio.timeout(START_S):
        while True:
            workers = await decode_workers(client)
            up = [worker for worker in workers if worker["running"] is not None and worker["pid"] not in killed]
            if len(up) == 2:
                return
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    main()
