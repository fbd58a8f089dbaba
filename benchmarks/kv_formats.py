"""What KV in eight bits saves: `python -m benchmarks.kv_formats [--threads 1]`, in two minutes. Refuses a machine that is busy.

The default model with both formats of KV in one process. A round times a step of each kind by one format and then by the
other; rounds take turns in which comes first. Blocks are scattered, as after some hours of service. Beside that, the bytes that
a token takes in the pool, in tiers and under way: a handoff moves the pool's own bytes, which `tests/fault/test_kv_formats.py`
counts on the wire.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.idle import why_busy
from benchmarks.lib.rounds import LEAST_PAIRS, interval
from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, ModelFacts
from configs.models import resolve
from engine.batch import Chunk
from engine.memory.kv_pool import token_bytes
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

FORMATS: tuple[KvCacheDtype, ...] = ("auto", "int8")
DECODES = ((16, 1024), (1, 7900), (16, 256), (1, 256))
"""Streams, and tokens of context of each."""
PREFILLS = ((512, 0), (512, 3584))
"""Tokens of a chunk, and tokens before it."""
BLOCK_SIZE, KV_TOKENS = 16, 16 * 1040
ROUNDS, WARM_UP = 15, 2
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.rounds < LEAST_PAIRS:
        parser.error(f"--rounds: an interval takes {LEAST_PAIRS} at least")
    if reason := why_busy():
        parser.error(reason)
    load_average = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    facts = resolve("smollm2").facts
    runners = {each: _runner(facts, each) for each in FORMATS}
    steps = {f"decode, {batch} x {context:,}": _decode(batch, context) for batch, context in DECODES}
    steps |= {f"prefill, {tokens} after {start:,}": _prefill(tokens, start) for tokens, start in PREFILLS}
    seconds = {name: _alternating(runners, chunks, options.rounds) for name, chunks in steps.items()}
    result = {
        "threads": options.threads,
        "arithmetic": {each: runner.arithmetic for each, runner in runners.items()},
        "load_average_before": load_average,
        "seconds": seconds,
        "token_bytes": {each: token_bytes(facts, torch.bfloat16, each) for each in FORMATS},
    }
    name = f"kv_formats_{operators()}" + (f"_{options.threads}_threads" if options.threads > 1 else "")
    write_result(name, result, table(result))


def table(result: dict[str, Any]) -> str:
    """Medians and their ratio as Markdown, and the 95 % interval of the rounds' ratios."""
    threads, sizes = result["threads"], result["token_bytes"]
    of = f"step of SmolLM2-135M, {threads} thread{'s' if threads > 1 else ''}"
    lines = [
        f"| {of} | KV in bfloat16, ms | KV in int8, ms | times as fast | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for step, seconds in result["seconds"].items():
        plain, quantized = seconds["auto"], seconds["int8"]
        of_rounds = interval([one / other for one, other in zip(plain, quantized, strict=True)])
        medians = statistics.median(plain), statistics.median(quantized)
        lines.append(
            f"| {step} | {medians[0] * 1e3:.1f} | {medians[1] * 1e3:.1f} | {medians[0] / medians[1]:.2f} "
            f"| {of_rounds['low']:.2f} to {of_rounds['high']:.2f} |"
        )
    lines += [
        "",
        f"Bytes of a token: {sizes['auto']:,} in bfloat16, {sizes['int8']:,} in int8 ({sizes['int8'] / sizes['auto']:.3f}).",
        f"Load average before: {result['load_average_before']:.1f}.",
        f"Command: `python -m benchmarks.kv_formats --threads {threads}`",
    ]
    return "\n".join(lines)


def _runner(facts: ModelFacts, kv_cache_dtype: KvCacheDtype) -> ModelRunner:
    runner = ModelRunner.load(
        facts,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_kv_tokens=KV_TOKENS,
        shared_weights=True,
    )
    runner.pool.fill_randomly()
    return runner


def _decode(batch: int, context: int) -> list[Chunk]:
    width = ceil_div(context + 1, BLOCK_SIZE)
    blocks = torch.randperm(KV_TOKENS // BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[: batch * width]
    tables = blocks.view(batch, width).tolist()
    return [Chunk([50 + i], context, table, sampling=GREEDY, num_generated=1) for i, table in enumerate(tables)]


def _prefill(tokens: int, start: int) -> list[Chunk]:
    (chunk,) = _decode(1, start + tokens)
    return [Chunk([50] * tokens, start, chunk.block_table, sampling=GREEDY, num_generated=0)]


def _alternating(runners: dict[KvCacheDtype, ModelRunner], chunks: list[Chunk], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by format."""
    seconds: dict[str, list[float]] = {each: [] for each in runners}
    for number in range(-WARM_UP, rounds):
        for each in FORMATS if number % 2 else FORMATS[::-1]:
            began = time.perf_counter()
            runners[each].execute(chunks)
            if number >= 0:
                seconds[each].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
