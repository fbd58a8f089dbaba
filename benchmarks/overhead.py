"""What a request costs outside the engine: `python -m benchmarks.overhead`, on an idle machine.

1. Time to first token: a 32-token prompt through HTTP at concurrency 1, against the engine's own prefill of the same prompt
   in this process. Same dtype, same number of threads. Taken in turns of ten; the first of each ten is not counted, for it
   finds the caches full of the other side's weights. The engine alone pauses between two prefills for as long as a request
   takes besides its prefill, because a processor that was idle computes more slowly than one that was not.
2. CPU per token: 16 streams at once. CPU time of every process that `tandem serve` started, less the engine's threads (the
   busiest thread of each worker), less what the same processes use when idle for as long, divided by the tokens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from typing import Any

import torch

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.request_cost import during, first_token_s, worker_pids
from benchmarks.lib.servers import HOST, cluster
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

PROMPT_TOKENS = 32
TURN = 10
STREAMS, STREAM_PROMPT, STREAM_ANSWER = 16, 64, 192
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--requests", type=int, default=100, help="for the time to first token")
    parser.add_argument("--rounds", type=int, default=5, help="for the CPU per token")
    options = parser.parse_args()
    with cluster(options.port) as serve_pid:
        first_token = measure_first_token(options.port, options.requests)
        cpu = [measure_cpu(options.port, serve_pid) for _ in range(options.rounds)]
    result = {"first_token": first_token, "cpu_per_token": cpu}
    write_result(f"overhead_{operators()}", result, table(first_token, cpu))


def measure_first_token(port: int, requests: int) -> dict[str, Any]:
    """Seconds, HTTP and engine in turns, every prompt new."""
    torch.set_num_threads(1)
    runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=1024)
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    rng = random.Random(0)
    through_http, in_engine = [], []
    for turn in range(requests // (TURN - 1) + 1):
        prompts = [[rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(TURN)]
        began = time.perf_counter()
        http_s = [first_token_s(connection, prompt) for prompt in prompts]
        request_s = (time.perf_counter() - began) / TURN
        engine_s: list[float] = []
        for prompt in prompts:
            pause_s = request_s - engine_s[-1] if engine_s else 0.0
            engine_s.append(prefill_s(runner, prompt, max(0.0, pause_s)))
        if turn:
            through_http += http_s[1:]
            in_engine += engine_s[1:]
    return {
        "requests": len(through_http),
        "dtype": runner.dtype_name,
        "http_ms": quantiles_ms(through_http),
        "engine_ms": quantiles_ms(in_engine),
        "extra_ms": round((statistics.median(through_http) - statistics.median(in_engine)) * 1e3, 2),
    }


def prefill_s(runner: ModelRunner, prompt: list[int], pause_s: float) -> float:
    """One prefill after a pause."""
    sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
    chunk = Chunk(token_ids=prompt, start=0, block_table=range(PROMPT_TOKENS // BLOCK_SIZE), sampling=sampling, num_generated=0)
    time.sleep(pause_s)
    began = time.perf_counter()
    runner.execute([chunk])
    return time.perf_counter() - began


def measure_cpu(port: int, serve_pid: int) -> dict[str, Any]:
    """One round: the same time idle and under 16 streams."""
    workers = worker_pids(port)
    tokens, busy_s, busy = during(serve_pid, workers, lambda: run_streams(port))
    _, idle_s, idle = during(serve_pid, workers, lambda: time.sleep(busy_s))
    by_process = {
        name: (busy.get(name, 0.0) - idle.get(name, 0.0) * busy_s / idle_s) / tokens * 1e6 for name in sorted({*busy, *idle})
    }
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / busy_s,
        "us_per_token": sum(by_process.values()),
        "us_per_token_by_process": {name: round(value, 1) for name, value in by_process.items()},
        "idle_cpu_percent": sum(idle.values()) / idle_s * 100,
    }


def run_streams(port: int) -> int:
    """All streams at once; the number of tokens made."""
    counts: list[int] = []

    def one(number: int) -> None:
        rng = random.Random(number)
        body = {
            "model": "smollm2",
            "prompt": [rng.randrange(100, 40_000) for _ in range(STREAM_PROMPT)],
            "max_tokens": STREAM_ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(HOST, port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        events = [line for line in connection.getresponse().read().splitlines() if line.startswith(b"data: {")]
        counts.append(json.loads(events[-1][6:])["usage"]["completion_tokens"])
        connection.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [STREAM_ANSWER] * STREAMS, counts
    return sum(counts)


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 2),
        "p90": round(ordered[int(len(ordered) * 0.9)] * 1e3, 2),
        "p99": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
    }


def table(first_token: dict[str, Any], cpu: list[dict[str, Any]]) -> str:
    median = sorted(cpu, key=lambda round_: float(round_["us_per_token"]))[len(cpu) // 2]
    rounds = ", ".join(f"{round_['us_per_token']:.0f}" for round_ in cpu)
    lines = [
        "# Cost outside the engine",
        "",
        f"Time to first token, {PROMPT_TOKENS}-token prompt, concurrency 1, {first_token['requests']} requests in turns with"
        f" the engine alone, {first_token['dtype']}; ms:",
        "",
        "| | p50 | p90 | p99 |",
        "|---|---|---|---|",
    ]
    for key, label in (("http_ms", "through HTTP"), ("engine_ms", "engine alone")):
        row = first_token[key]
        lines.append(f"| {label} | {row['p50']} | {row['p90']} | {row['p99']} |")
    lines.append(f"| **difference of the medians** | **{first_token['extra_ms']}** | | |")
    lines += [
        "",
        f"CPU outside the engine, {STREAMS} streams of {STREAM_PROMPT} in, {STREAM_ANSWER} out; median of {len(cpu)} rounds:",
        "",
        "| process | µs per token |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value} |" for name, value in median["us_per_token_by_process"].items()]
    lines += [
        f"| **sum** | **{median['us_per_token']:.0f}** (rounds: {rounds}) |",
        "",
        f"At {median['tokens_per_s']:.0f} tokens/s. Idle use of the same processes, subtracted above: "
        f"{median['idle_cpu_percent']:.1f} % of one core.",
        "",
        "Command: `python -m benchmarks.overhead`",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
