"""What caches cost a request that shares nothing with others: `python -m benchmarks.unshared`, on an idle machine.

Two clusters of one prefill and one decode worker take turns, fresh in each round: one chooses workers by load alone, the other
by what they have cached, and has a memory tier, into which everything is written. All prompts are random, so that nothing is
ever found. 16 streams at a time, 256 tokens in, 128 out; then single requests of 256 tokens, one after the other.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks.lib.environment import ROOT, operators, write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.rounds import Round, compare, interval, origin, round_ratios, spread
from benchmarks.lib.servers import TANDEM, System, serving

STREAMS = 16
PROMPTS, SINGLE = RandomPrompts(256, 128), RandomPrompts(256, 8)
TIER_GIB = 2
SYSTEMS = {"load alone": ("--routing", "load"), "caches and a tier": ("--kv-offloading-size", str(TIER_GIB))}
FIGURES = {
    "tpot_ms": ("time per token of 16 streams", "ms"),
    "s_per_1000": ("time of 1,000 tokens of 16 streams", "s"),
    "ttft_ms": ("TTFT of a single request", "ms"),
}
"""What is compared; less is better."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64, help="of 16 streams, in each round")
    parser.add_argument("--singles", type=int, default=20, help="single requests in each round")
    parser.add_argument("--port", type=int, default=8199)
    add_state(parser)
    options = parser.parse_args()
    systems = [
        System(name, f"tandem serve {' '.join(flags)}", [TANDEM, "serve", *flags], {"PYTHONPATH": str(ROOT)})
        for name, flags in SYSTEMS.items()
    ]
    journal = journal_of(parser, options)
    found = compare(systems, options.rounds, journal, lambda system, seed: measure(system, options, seed))
    costs = {figure: interval(ratios(found["rounds"], figure)) for figure in FIGURES}
    result = {"requests": options.requests, "singles": options.singles, **found, "costs": costs}
    write_result(f"unshared_{operators()}", result, table(result))


async def measure(system: System, options: argparse.Namespace, seed: int) -> Round:
    """One round, on a fresh server. Raises RuntimeError if a request fails, or finds something in a cache."""
    rng = random.Random(seed)
    with serving(system, options.port) as url:
        await warm_up(url)
        many = bench_options(url, PROMPTS, num_prompts=options.requests, seed=rng.getrandbits(30), max_concurrency=STREAMS)
        single = bench_options(url, SINGLE, num_prompts=options.singles, seed=rng.getrandbits(30), max_concurrency=1)
        loaded, alone = await put_load(many), await put_load(single)
    for each in (loaded, alone):
        if each.figures["failed"]:
            raise RuntimeError(f"{each.figures['failed']} requests failed")
        if cached := sum(record.cached_tokens or 0 for record in each.records):
            raise RuntimeError(f"{cached} tokens of random prompts were cached")
    return {
        "tpot_ms": loaded.figures["p50_tpot_ms"],
        "s_per_1000": 1000 / loaded.figures["output_throughput"],
        "ttft_ms": alone.figures["p50_ttft_ms"],
    }


def ratios(rounds: dict[str, list[Round]], figure: str) -> list[float]:
    """How many times as long it takes with caches and a tier, by round."""
    without, cached = rounds.values()
    return round_ratios(cached, without, figure)


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rounds: dict[str, list[Round]] = result["rounds"]
    names = list(rounds)
    lines = [
        "# What caches cost a request that shares nothing",
        "",
        f"1 prefill and 1 decode worker, random prompts of {PROMPTS.input_len} tokens; {result['requests']} requests, "
        f"{STREAMS} at a time, then {result['singles']} single ones, in each of {len(rounds[names[0]])} rounds. With caches, "
        f"workers are chosen by them, and all is written to a memory tier of {TIER_GIB} GiB.",
        "",
        f"| | {names[0]} | {names[1]} | takes so many times as long | 95 % |",
        "|---|---|---|---|---|",
    ]
    for figure, (title, unit) in FIGURES.items():
        cost = result["costs"][figure]
        shown = [f"{spread([each[figure] for each in rounds[name]], 2)} {unit}" for name in names]
        lines.append(f"| {title} | {shown[0]} | {shown[1]} | {cost['median']:.3f} | {cost['low']:.3f} to {cost['high']:.3f} |")
    lines += ["", "Medians, lowest to highest in brackets.", "", origin(result, "unshared")]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
