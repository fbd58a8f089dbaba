"""How routing and supervision grow with the cluster: `python -m benchmarks.scale [--requests N]`.

1. Simulated clusters of 10, 100 and 1,000 workers, half of each role, with the same load per worker: what a choice of a pair
   takes in a router (`router.rules.pair`), what a change of a load takes there, what the simulation takes per request. The
   largest gets `--requests`, 1,000,000 by default; every request has to end and no block may be lost.
2. The controller's supervisor over processes that do nothing: bringing all workers up, and making the view that routers get.

All but wall times are CPU time of the thread. Step times come from the profile of a laptop, which decides about nothing here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from pydantic import TypeAdapter

from benchmarks.lib.environment import write_result
from cluster.launcher import Process, Started
from cluster.records import ClusterRecord
from cluster.supervision.supervisor import Supervisor
from configs.loader import load_config
from configs.schema import ClusterConfig
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef
from router.rules.pair import PairSearch
from simulator.cluster import Cluster, Shape
from simulator.profile import LAPTOP, Profile
from simulator.request import Request

SIZES = (10, 100, 1000)
SMALL_REQUESTS = 5_000
RATE_PER_WORKER = 1.0
"""Requests per second: a tenth to a fifth of what the workers could do, so that a router's line is half busy at 1,000."""
ROUTERS = 2
PROMPT_TOKENS, ANSWER_TOKENS, SPREAD = 110, 18, 0.8
"""Medians and sigma of log-normal lengths: about Azure's conversations with lengths / 8."""
TIMED_ONE_OF = 29
"""Prime to the number of looks of a request."""

_T = TypeVar("_T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the largest cluster")
    options = parser.parse_args()
    rows = []
    for workers in SIZES:
        num = options.requests if workers == SIZES[-1] else SMALL_REQUESTS
        rows.append(simulated(workers, num) | asyncio.run(supervised(workers)))
        print(rows[-1], flush=True)
    write_result("scale", {"rows": rows}, table(rows, f"python -m benchmarks.scale --requests {options.requests}"))


def simulated(workers: int, num: int) -> dict[str, float]:
    config = load_config(None, {"http.router_replicas": ROUTERS})
    ended = {"answered": 0, "refused": 0}

    def on_end(request: Request) -> None:
        ended["refused" if request.error else "answered"] += 1

    cluster = Cluster(Shape(workers // 2, workers // 2), config, Profile.load(LAPTOP), on_end)
    looks, questions, pairs, changes = list[float](), list[float](), list[float](), list[float]()
    for router in cluster.routers:
        for ranking in (router.prefill_ranking, router.decode_ranking):
            vars(ranking)["put"] = timed(ranking.put, changes)
    gc.collect()
    gc.disable()  # nothing here is a cycle, and looking for some takes longer the more requests there are
    began, cpu_began = time.perf_counter(), time.process_time()
    with (
        patch.object(PairSearch, "__init__", timed(PairSearch.__init__, looks)),
        patch.object(PairSearch, "next_decode", timed(PairSearch.next_decode, questions)),
        patch.object(PairSearch, "pair", timed(PairSearch.pair, pairs)),
    ):
        cluster.run(requests(num, workers * RATE_PER_WORKER))
    cpu_s, wall_s = time.process_time() - cpu_began, time.perf_counter() - began
    gc.enable()
    assert ended["answered"] + ended["refused"] == num, "every request ends once"
    cluster.check_integrity()
    return {
        "workers": workers,
        "requests": num,
        **ended,
        "wall_s": wall_s,
        "cpu_us_per_request": cpu_s / num * 1e6,
        **{f"choice_us_p{p}": 1e6 * sum(float(np.percentile(each, p)) for each in (looks, questions, pairs)) for p in (50, 99)},
        **{f"change_us_p{p}": 1e6 * float(np.percentile(changes, p)) for p in (50, 99)},
    }


def timed(call: Callable[..., _T], seconds: list[float]) -> Callable[..., _T]:
    """The same call; one of `TIMED_ONE_OF` is timed, for reading the clock of a thread takes as long as some of them."""
    numbers = count()

    def run(*args: Any) -> _T:
        if next(numbers) % TIMED_ONE_OF:
            return call(*args)
        began = time.thread_time()
        result = call(*args)
        seconds.append(time.thread_time() - began)
        return result

    return run


def requests(num: int, rate: float) -> Iterator[Request]:
    """Prompts are pieces of one random text from random places, so that they begin differently."""
    rng = np.random.default_rng(0)
    text = tuple(rng.integers(0, 32_768, 1 << 20).tolist())
    at = 0.0
    for index in range(num):
        at += rng.exponential(1 / rate)
        prompt_len, answer_len = np.clip(rng.lognormal(0, SPREAD, 2) * (PROMPT_TOKENS, ANSWER_TOKENS), 1, 4096).astype(int)
        start = int(rng.integers(0, len(text) - prompt_len))
        yield Request(index, at, text[start : start + int(prompt_len)], int(answer_len))


class IdleProcess:
    """A worker's life in which nothing happens."""

    def __init__(self, ref: WorkerRef) -> None:
        self._ref = ref
        self._over = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self._ref.worker_id}-{self._ref.epoch}",)

    async def start(self) -> Started:
        return Started(self._ref, (1,), "node")

    async def resume(self, names: Sequence[str]) -> None:
        raise AssertionError("there was no former supervisor")

    async def run(self) -> None:
        await self._over.wait()

    async def drain(self) -> None:
        return None

    async def take_role(self, duty: Duty) -> None:
        return None

    async def stop(self) -> None:
        self._over.set()

    async def kill(self) -> None:
        self._over.set()


class IdleLauncher:
    def process(self, role: Role, worker_id: str, epoch: int, config: ClusterConfig) -> Process:
        return IdleProcess(WorkerRef(worker_id=worker_id, epoch=epoch, address="tcp://127.0.0.1:1"))

    async def take_up(self, lives: Mapping[WorkerLife, Sequence[str]], worker_ids: Sequence[str]) -> None:
        raise AssertionError("there was no former supervisor")

    async def release(self, worker_id: str) -> None:
        return None

    async def why_not_started(self, role: Role) -> str:
        return "they start at once"


RECORD = TypeAdapter(ClusterRecord)


class MemoryRecords:
    """Makes the record, as the GCS would get it, and holds it."""

    def __init__(self) -> None:
        self._record: bytes | None = None

    async def load(self) -> ClusterRecord | None:
        return None if self._record is None else RECORD.validate_json(self._record)

    async def save(self, record: ClusterRecord) -> None:
        self._record = RECORD.dump_json(record)


async def supervised(workers: int) -> dict[str, float]:
    config = load_config(None, {"prefill.workers": workers // 2, "decode.workers": workers // 2})
    supervisor = Supervisor(config, IdleLauncher(), MemoryRecords())
    began = time.thread_time()
    await supervisor.start()
    await supervisor.settle(60.0)
    up_s = time.thread_time() - began
    views = []
    for _ in range(20):
        began = time.thread_time()
        supervisor.view()
        views.append(time.thread_time() - began)
    await supervisor.close()
    return {"start_ms": 1e3 * up_s, "view_us": 1e6 * float(np.median(views))}


def table(rows: list[dict[str, float]], command: str) -> str:
    lines = [
        "# How routing and supervision grow",
        "",
        "| workers | requests simulated | refused | wall | CPU per request | choice of a pair p50 / p99 "
        "| change of a load p50 / p99 | controller: all workers up | its view |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['workers']} | {row['requests']:,} | {row['refused']} | {row['wall_s']:.0f} s "
            f"| {row['cpu_us_per_request']:.0f} µs | {row['choice_us_p50']:.0f} / {row['choice_us_p99']:.0f} µs "
            f"| {row['change_us_p50']:.1f} / {row['change_us_p99']:.1f} µs "
            f"| {row['start_ms']:.0f} ms | {row['view_us']:.0f} µs |"
        )
    lines += [
        "",
        f"{RATE_PER_WORKER:g} request/s per worker, {ROUTERS} routers. The choice is the order of the decode workers, whom to "
        "ask, and the pair once blocks are reserved: the sum of their percentiles. CPU times, but for walls.",
        "",
        f"Command: `{command}`",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
