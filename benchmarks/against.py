"""This working tree beside another commit: `python -m benchmarks.against [COMMIT]`, on an idle machine; `make bench-smoke`.

COMMIT is one of this repository, by default where this branch left `main`, or the one before. Its files are unpacked into a
temporary folder and run with this environment's packages; its native operators are compiled at their first start.

    pair 1: this, other    pair 2: other, this    ...    each pair gives a ratio, this / other

1. The engine alone, one thread, a new process each time: prefill of one prompt, decode steps of 1 and 16 sequences.
2. A cluster, a new one each time: 16 streams over HTTP (256 tokens in, 128 out), processor time outside the engines for each
   token of these, and the time to the first token of a 32-token prompt when nothing else runs.

The result, `against_COMMIT`, is the median ratio of the pairs with a 95 % interval of their geometric mean, by Student's t.
`--smoke` is smaller, takes about five minutes (two pairs are measured whatever they take), writes no result, and takes a busy
machine, where intervals are wide. Of six ratios one is outside its interval by chance in every fourth run.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.idle import why_busy
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.measured_process import MeasuredProcess
from benchmarks.lib.request_cost import during, first_token_s, worker_pids
from benchmarks.lib.rounds import LEAST_PAIRS, interval
from benchmarks.lib.servers import HOST, TANDEM, System, serving_process

STREAMS, FIRST_TOKEN_PROMPT = 16, 32
COSTS = {"ttft_ms", "cpu_us_per_token"}
"""Figures of which less is better."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    engine: Mapping[str, Any]
    """Lengths of prefills, and sequences with their context of decodes."""
    requests: int
    prompts: RandomPrompts
    first_tokens: int
    pairs: int
    warm_up: bool
    """Whether each first has a round that is not counted. The engine always has: it compiles then."""
    engine_until_s: float = float("inf")
    """Seconds after the beginning by which the engines' last pair should have ended, once there are two."""
    until_s: float = float("inf")
    """The same for the clusters."""


FULL = Size({"prefill": [256, 1024], "decode": [(1, 256), (16, 256)]}, 48, RandomPrompts(256, 128), 20, 10, warm_up=True)
SMOKE = Size(
    {"prefill": [256], "decode": [(1, 256), (16, 256)]},
    *(24, RandomPrompts(256, 64), 5, 8),
    warm_up=False,
    engine_until_s=100,
    until_s=285,
)


@dataclass
class Pairs:
    """What was measured of both, in the order of the pairs."""

    this: list[Figures] = field(default_factory=list)
    other: list[Figures] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """This tree's figure divided by the other commit's, for each pair."""
        return [this[name] / other[name] for this, other in zip(self.this, self.other, strict=True)]


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare with; default: where this branch left main")
    parser.add_argument("--smoke", action="store_true", help="a short comparison, without a result")
    parser.add_argument("--port", type=int, default=8199, help="of the clusters")
    options = parser.parse_args()
    began = time.monotonic()
    load_average = os.getloadavg()[0]
    if reason := why_busy():
        if not options.smoke:
            parser.error(reason)
        print(f"{reason}: expect wide intervals", flush=True)
    try:
        commit = git("rev-parse", "--short=12", "--verify", f"{options.commit or reference()}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        parser.error(f"{options.commit or 'HEAD~1'} is no commit of this repository")
    print(f"this tree / {commit}: {git('log', '-1', '--format=%s', commit)}", flush=True)
    size = SMOKE if options.smoke else FULL
    with tempfile.TemporaryDirectory(prefix="tandem-against-") as folder:
        other = unpacked(commit, Path(folder) / "tandem")
        found = [compare_engines(other, size, began), compare_clusters(other, size, began, options.port)]
    rows = {name: interval(pairs.ratios(name)) for pairs in found for name in pairs.this[0]}
    result = {
        "other": commit,
        "load_average_before": load_average,
        "pairs": [{"this": pairs.this, "other": pairs.other} for pairs in found],
        "ratios": rows,
    }
    if options.smoke:
        print(f"\n{table(result, size)}\n\n{time.monotonic() - began:.0f} s")
    else:
        write_result(f"against_{commit[:7]}", result, table(result, size))


def reference() -> str:
    """Return where this branch left `main`; on `main` itself the latest commit, or the one before if nothing has changed."""
    head = git("rev-parse", "HEAD")
    for main_branch in ("origin/main", "main"):
        try:
            base = git("merge-base", "HEAD", main_branch)
        except subprocess.CalledProcessError:
            continue
        if base != head:
            return base
    return "HEAD" if git("status", "--porcelain", "-uno") else "HEAD~1"


def git(*words: str) -> str:
    """Return what git says of this repository. Raises CalledProcessError if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def unpacked(commit: str, folder: Path) -> Path:
    """Unpack the files of a commit into a new folder, and return it."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def compare_engines(other: Path, size: Size, began: float) -> Pairs:
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
                return {name: value for name, value in process.measure(dict(size.engine)).items() if "/s" not in name}

        measure(ROOT)
        measure(other)
        return in_turns(partial(measure, ROOT), partial(measure, other), size.pairs, began + size.engine_until_s)


def compare_clusters(other: Path, size: Size, began: float, port: int) -> Pairs:
    """A new cluster for each figure, for the same reason."""

    def measure(checkout: Path) -> Figures:
        environment = {"PYTHONPATH": str(checkout)}
        system = System(name=checkout.name, settings="", command=[TANDEM, "serve"], environment=environment)
        with serving_process(system, port) as serving:
            asyncio.run(warm_up(f"http://{HOST}:{port}"))
            return measure_cluster(port, serving.pid, size)

    if size.warm_up:
        measure(ROOT)
        measure(other)
    return in_turns(partial(measure, ROOT), partial(measure, other), size.pairs, began + size.until_s)


def measure_cluster(port: int, serve_pid: int, size: Size) -> Figures:
    """Raises RuntimeError if a request fails."""
    seed = random.randrange(2**31)  # what was cached for one pair is of no use to the next
    url, requests = f"http://{HOST}:{port}", size.requests
    load = bench_options(url, size.prompts, num_prompts=requests, seed=seed, max_concurrency=STREAMS)
    found, _, spent = during(serve_pid, worker_pids(port), lambda: asyncio.run(put_load(load)))
    if failed := found.figures["failed"]:
        raise RuntimeError(f"{failed} requests failed")
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    prompts = [[random.randrange(100, 40_000) for _ in range(FIRST_TOKEN_PROMPT)] for _ in range(size.first_tokens)]
    first_tokens = [first_token_s(connection, prompt) for prompt in prompts]
    connection.close()
    return {
        "output_tokens_per_s": found.figures["output_throughput"],
        "cpu_us_per_token": sum(spent.values()) / (requests * size.prompts.output_len) * 1e6,
        "ttft_ms": statistics.median(first_tokens) * 1e3,
    }


def in_turns(this: Callable[[], Figures], other: Callable[[], Figures], pairs: int, until: float) -> Pairs:
    """At most so many pairs, and from the third on none that would end after `until`, by the longest so far."""
    found = Pairs()
    longest = 0.0
    for number in range(pairs):
        began = time.monotonic()
        if number >= LEAST_PAIRS and began + longest > until:
            break
        turns = [(found.this, this), (found.other, other)]
        for measured, measure in turns if number % 2 == 0 else reversed(turns):
            measured.append(measure())
        longest = max(longest, time.monotonic() - began)
        ratios = ", ".join(f"{name} {found.ratios(name)[-1]:.3f}" for name in found.this[0])
        print(f"pair {number + 1}: {ratios}", flush=True)
    return found


def verdict(name: str, row: Mapping[str, float]) -> str:
    """Return whether the interval of a figure's ratio is above or below 1, and what that means."""
    if row["low"] <= 1 <= row["high"]:
        return "within noise"
    return "**better**" if (row["low"] > 1) != (name in COSTS) else "**worse**"


def table(result: dict[str, Any], size: Size) -> str:
    """Markdown."""
    counts = " and ".join(str(len(pairs["this"])) for pairs in result["pairs"])
    lines = [
        "# This commit beside another one",
        "",
        f"This commit / {result['other']}, {counts} alternating pairs of engines and of clusters. Throughput: {STREAMS} "
        f"streams over HTTP, {size.prompts.input_len} tokens in, {size.prompts.output_len} out.",
        "",
        "| figure | median ratio | 95 % interval | better is | |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["ratios"].items():
        better = "less" if name in COSTS else "more"
        interval_of = f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"| {name} | {row['median']:.3f} | {interval_of} | {better} | {verdict(name, row)} |")
    lines += ["", f"Load average before: {result['load_average_before']:.1f}. Command: `python -m benchmarks.against COMMIT`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
