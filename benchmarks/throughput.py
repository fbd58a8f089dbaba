"""Tokens per second of full servers, beside others: `python -m benchmarks.throughput --peer-env DIR`, on an idle machine.

16 streams over HTTP, each followed by the next as long as there are requests; 256 random tokens in, 128 out. Systems take
turns, each with all cores. Medians of the rounds, and ratios of each round to the same round of our first system.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.rounds import Round, compare, median, origin, round_ratios, spread
from benchmarks.lib.servers import System, add_options, chosen, serving

STREAMS = 16
PROMPTS = RandomPrompts(256, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8 * STREAMS, help="in each round")
    add_options(parser)
    add_state(parser)
    options = parser.parse_args()
    systems, journal = chosen(parser, options), journal_of(parser, options)
    result = {
        "streams": STREAMS,
        "requests": options.requests,
        **compare(systems, options.rounds, journal, lambda system, seed: measure(system, options.port, options.requests, seed)),
    }
    write_result(f"throughput_{operators()}", result, table(result))


async def measure(system: System, port: int, requests: int, seed: int) -> Round:
    """One round, on a fresh server. Raises RuntimeError if a request fails."""
    with serving(system, port) as url:
        await warm_up(url)
        load = bench_options(url, PROMPTS, num_prompts=requests, seed=seed, max_concurrency=STREAMS)
        found = await put_load(load)
    if failed := found.figures["failed"]:
        raise RuntimeError(f"{failed} requests failed")
    return {
        "output_tokens_per_s": found.figures["output_throughput"],
        "ttft_p50_ms": found.figures["p50_ttft_ms"],
        "ttft_p99_ms": found.figures["p99_ttft_ms"],
        "tpot_p50_ms": found.figures["p50_tpot_ms"],
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rounds: dict[str, list[Round]] = result["rounds"]
    first = next(iter(rounds))
    lines = [
        "# Throughput",
        "",
        f"{result['streams']} streams at a time, {PROMPTS.input_len} tokens in, {PROMPTS.output_len} out, {result['requests']} "
        f"requests in each of {len(rounds[first])} rounds; medians, lowest to highest in brackets.",
        "",
        f"| | output tokens/s | {first} has so many times as much | TTFT p50 | TTFT p99 | TPOT p50 | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        speeds = [each["output_tokens_per_s"] for each in found]
        ratio = statistics.median(round_ratios(rounds[first], found, "output_tokens_per_s"))
        times = " | ".join(f"{median(found, figure):.0f} ms" for figure in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms"))
        lines.append(f"| {name} | {spread(speeds)} | {ratio:.2f} | {times} | {result['settings'][name]} |")
    return "\n".join([*lines, "", origin(result, "throughput --peer-env DIR")])


if __name__ == "__main__":
    main()
