"""Throughput of one rank of engine: `python -m benchmarks.engine [--baseline CHECKOUT]`.

Prefill of one prompt in chunks of 512, and decode steps of sequences of like context in scattered blocks, with the default
model in its default dtype on one thread. Every round is a process of its own; with a baseline, rounds of the two checkouts
take turns. Time is the CPU time of the computing thread, so that other processes cost it only caches and bandwidth. Beside
it, what the machine can do in the same process: matrix products and reading of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, write_result
from configs.facts import ModelFacts
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.messages import SamplingParams

PREFILLS = (256, 512, 1024)
DECODES = ((1, 256), (2, 256), (4, 256), (8, 256), (16, 256), (32, 256), (1, 1024), (16, 1024))
"""Sequences, tokens of context."""
CHUNK_TOKENS, BLOCK_SIZE, DECODE_STEPS = 512, 16, 8
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-round", action="store_true", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.one_round:
        print(json.dumps(measure()))
        return
    checkouts = {"engine": ROOT} | ({"baseline": options.baseline.resolve()} if options.baseline else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(options.rounds):
        for name, checkout in checkouts.items():
            rounds[name].append(one_round(checkout))
            print(f"round {number + 1}: {name} {rounds[name][-1]}")
    medians = {
        name: {key: statistics.median(round_[key] for round_ in measured) for key in measured[0]}
        for name, measured in rounds.items()
    }
    result = {"rounds": rounds, "medians": medians, "baseline_commit": commit(options.baseline) if options.baseline else None}
    write_result("engine", result, table(medians, resolve("smollm2").facts, options.rounds, result["baseline_commit"]))


def one_round(checkout: Path) -> dict[str, float]:
    """Run this very script on the modules of `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-P", __file__, "--one-round"]  # -P: this folder holds an `engine` of its own
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure() -> dict[str, float]:
    """Tokens per second by name; GFLOP/s and GB/s of the machine."""
    torch.set_num_threads(1)
    runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=65_536)
    runner.pool.data.normal_()
    measured = machine_limits()
    for length in PREFILLS:
        measured[f"prefill {length}"] = length / median_s(lambda length=length: prefill(runner, length))  # type: ignore[misc]
    for size, context in DECODES:
        work = decode(runner, size, context)
        measured[f"decode {size} x {context}"] = size * DECODE_STEPS / median_s(work)
    return {name: round(value, 1) for name, value in measured.items()}


def median_s(work: Callable[[], Any], repeats: int = 5) -> float:
    """CPU seconds of this thread."""
    work()
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def machine_limits() -> dict[str, float]:
    one = torch.randn(1024, 1024)
    half = one.bfloat16()
    memory = torch.ones(1 << 26)
    flop = 2 * 1024**3
    return {
        "bfloat16 GFLOP/s": flop / median_s(lambda: half @ half, 20) / 1e9,
        "float32 GFLOP/s": flop / median_s(lambda: one @ one, 20) / 1e9,
        "read GB/s": memory.nbytes / median_s(memory.sum) / 1e9,
    }


def prefill(runner: ModelRunner, length: int) -> None:
    tokens = [(7 * i * i + 13 * i) % 49_000 + 17 for i in range(length)]
    for start in range(0, length, CHUNK_TOKENS):
        last = start + CHUNK_TOKENS >= length
        chunk = Chunk(tokens[start : start + CHUNK_TOKENS], start, range(length // BLOCK_SIZE), GREEDY if last else None, 0)
        runner.execute([chunk])


def decode(runner: ModelRunner, size: int, context: int) -> Callable[[], None]:
    blocks = list(range(runner.pool.num_blocks))
    random.Random(0).shuffle(blocks)
    needed = (context + DECODE_STEPS) // BLOCK_SIZE + 1
    tables = [blocks[i * needed : (i + 1) * needed] for i in range(size)]

    def steps() -> None:
        for step in range(DECODE_STEPS):
            runner.execute([Chunk((50 + i,), context + step, table, GREEDY, step) for i, table in enumerate(tables)])

    return steps


def prefill_flop_per_token(facts: ModelFacts, length: int) -> float:
    """Linear layers, and attention to half the prompt on average."""
    heads = facts.num_heads + 2 * facts.num_kv_heads
    layer = facts.hidden_size * (heads + facts.num_heads) * facts.head_dim + 3 * facts.hidden_size * facts.intermediate_size
    return facts.num_layers * (2 * layer + 2 * facts.num_heads * facts.head_dim * length)


def commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def table(medians: dict[str, dict[str, float]], facts: ModelFacts, rounds: int, baseline_commit: str | None) -> str:
    engine, baseline = medians["engine"], medians.get("baseline")
    lines = [
        "# The engine alone",
        "",
        f"{facts.name}, one thread, tokens per second of CPU time; medians of {rounds} rounds"
        + (f" in turns with commit {baseline_commit}." if baseline_commit else "."),
        "",
        "| | tokens/s | share of the machine's bfloat16 GFLOP/s |" + (" before | ratio |" if baseline else ""),
        "|---|---|---|" + ("---|---|" if baseline else ""),
    ]
    for name in (key for key in engine if key.startswith(("prefill", "decode"))):
        share = ""
        if name.startswith("prefill"):
            flops = engine[name] * prefill_flop_per_token(facts, int(name.split()[1])) / 1e9
            share = f"{flops / engine['bfloat16 GFLOP/s']:.0%}"
        before = f" {baseline[name]:.0f} | {engine[name] / baseline[name]:.2f} |" if baseline else ""
        lines.append(f"| {name} | {engine[name]:.0f} | {share} |{before}")
    limits = ", ".join(f"{engine[key]:.0f} {key}" for key in ("bfloat16 GFLOP/s", "float32 GFLOP/s", "read GB/s"))
    command = "python -m benchmarks.engine" + (" --baseline CHECKOUT" if baseline else "")
    return "\n".join([*lines, "", f"The machine, one thread: {limits}.", "", f"Command: `{command}`"])


if __name__ == "__main__":
    main()
