"""This checkout beside another one: `python -m benchmarks.against CHECKOUT`, on an idle machine.

CHECKOUT is a clone of this repository at the commit to compare with, with a `.venv` of its own (`make install` there).

    pair 1: this, other    pair 2: other, this    ...    each pair gives a ratio, this / other

1. The engine alone, one thread, a new process each time: prefill of one prompt, decode steps of 1 and 16 sequences.
2. A cluster, a new one each time: 16 streams over HTTP (256 tokens in, 128 out), processor time outside the engines for each
   token of these, and the time to the first token of a 32-token prompt when nothing else runs.

The result, `against_COMMIT`, is the median ratio of the pairs with a 95 % interval of their geometric mean, by Student's t.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import commit
from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.measured_process import MeasuredProcess
from benchmarks.lib.request_cost import during, first_token_s, worker_pids
from benchmarks.lib.rounds import T_975, interval
from benchmarks.lib.servers import HOST, System, serving_process

ENGINE = {"prefill": [256, 1024], "decode": [(1, 256), (16, 256)]}
STREAMS, REQUESTS, PROMPTS = 16, 48, RandomPrompts(256, 128)
FIRST_TOKENS, FIRST_TOKEN_PROMPT = 20, 32
COSTS = {"ttft_ms", "cpu_us_per_token"}
"""Figures of which less is better."""
Figures = dict[str, float]


@dataclass
class Pairs:
    """What was measured of both, in the order of the pairs."""

    this: list[Figures] = field(default_factory=list)
    other: list[Figures] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """This checkout's figure divided by the other one's, for each pair."""
        return [this[name] / other[name] for this, other in zip(self.this, self.other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--pairs", type=int, default=10, choices=sorted(T_975))
    parser.add_argument("--port", type=int, default=8199, help="of the clusters")
    options = parser.parse_args()
    other = options.checkout.resolve()
    load_average = os.getloadavg()[0]
    found = [compare_engines(other, options.pairs), compare_clusters(other, options.pairs, options.port)]
    rows = {name: interval(pairs.ratios(name)) for pairs in found for name in pairs.this[0]}
    result = {
        "other": commit(other),
        "load_average_before": load_average,
        "pairs": [{"this": pairs.this, "other": pairs.other} for pairs in found],
        "ratios": rows,
    }
    write_result(f"against_{commit(other)[:7]}", result, table(result, options.pairs))


def compare_engines(other: Path, pairs: int) -> Pairs:
    """A new process for each figure: where the kernel happens to put a process's memory is a bias that lasts for its life."""
    core = sorted(os.sched_getaffinity(0))[:1]
    with tempfile.TemporaryDirectory() as logs:

        def measure(checkout: Path) -> Figures:
            command = [sys.executable, str(checkout / "benchmarks" / "peers" / "measure_tandem.py"), "1"]
            environment = {"PYTHONPATH": str(checkout)}
            name = "this" if checkout == ROOT else "other"
            log = Path(logs) / f"{name}.log"
            process = MeasuredProcess(name, command, cores=core, environment=environment, cwd=Path(logs), log=log)
            with closing(process):
                return {name: value for name, value in process.measure(ENGINE).items() if "/s" not in name}

        return in_turns(partial(measure, ROOT), partial(measure, other), pairs)


def compare_clusters(other: Path, pairs: int, port: int) -> Pairs:
    """A new cluster for each figure, for the same reason."""

    def measure(checkout: Path) -> Figures:
        command = [str(checkout / ".venv" / "bin" / "tandem"), "serve"]
        system = System(name=checkout.name, settings="", command=command, environment={"PYTHONPATH": str(checkout)})
        with serving_process(system, port) as serving:
            asyncio.run(warm_up(f"http://{HOST}:{port}"))
            return measure_cluster(port, serving.pid)

    return in_turns(partial(measure, ROOT), partial(measure, other), pairs)


def measure_cluster(port: int, serve_pid: int) -> Figures:
    """Raises RuntimeError if a request fails."""
    seed = random.randrange(2**31)  # what was cached for one pair is of no use to the next
    load = bench_options(f"http://{HOST}:{port}", PROMPTS, num_prompts=REQUESTS, seed=seed, max_concurrency=STREAMS)
    found, _, spent = during(serve_pid, worker_pids(port), lambda: asyncio.run(put_load(load)))
    if failed := found.figures["failed"]:
        raise RuntimeError(f"{failed} requests failed")
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    prompts = [[random.randrange(100, 40_000) for _ in range(FIRST_TOKEN_PROMPT)] for _ in range(FIRST_TOKENS)]
    first_tokens = [first_token_s(connection, prompt) for prompt in prompts]
    connection.close()
    return {
        "output_tokens_per_s": found.figures["output_throughput"],
        "cpu_us_per_token": sum(spent.values()) / (REQUESTS * PROMPTS.output_len) * 1e6,
        "ttft_ms": statistics.median(first_tokens) * 1e3,
    }


def in_turns(this: Callable[[], Figures], other: Callable[[], Figures], pairs: int) -> Pairs:
    """After one round of each that is not counted."""
    this()
    other()
    found = Pairs()
    for number in range(pairs):
        turns = [(found.this, this), (found.other, other)]
        for measured, measure in turns if number % 2 == 0 else reversed(turns):
            measured.append(measure())
        ratios = ", ".join(f"{name} {found.ratios(name)[-1]:.3f}" for name in found.this[0])
        print(f"pair {number + 1}: {ratios}", flush=True)
    return found


def table(result: dict[str, Any], pairs: int) -> str:
    """Markdown."""
    lines = [
        "# This commit beside another one",
        "",
        f"This commit / {result['other']}, {pairs} alternating pairs. Throughput: {STREAMS} streams over HTTP, "
        f"{PROMPTS.input_len} tokens in, {PROMPTS.output_len} out.",
        "",
        "| figure | median ratio | 95 % interval | better is |",
        "|---|---|---|---|",
    ]
    for name, row in result["ratios"].items():
        better = "less" if name in COSTS else "more"
        lines.append(f"| {name} | {row['median']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {better} |")
    lines += ["", f"Load average before: {result['load_average_before']:.1f}. Command: `python -m benchmarks.against CHECKOUT`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
