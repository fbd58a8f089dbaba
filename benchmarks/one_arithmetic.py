"""What it costs that a row has the same bits in any company: `python -m benchmarks.one_arithmetic`, on an idle machine.

Full servers as in `benchmarks.throughput`, with the products that give a row the same bits in any company, and with oneDNN's,
which do not, in the same engine. The latter compute with the bfloat16 that the stored weights stand for: oneDNN has no product
with these. They take turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT, operators, write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.rounds import Round, compare, median, origin, round_ratios, spread
from benchmarks.lib.servers import System, system
from benchmarks.throughput import PROMPTS, STREAMS, measure

ROUNDS = 5
OURS, ONEDNN = "one arithmetic", "oneDNN"
CHANGED = Path(__file__).with_name("onednn_products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=8 * STREAMS, help="in each round")
    parser.add_argument("--port", type=int, default=8199)
    add_state(parser)
    options = parser.parse_args()
    journal = journal_of(parser, options)
    result = {
        "requests": options.requests,
        **compare(systems(), options.rounds, journal, lambda each, seed: measure(each, options.port, options.requests, seed)),
    }
    write_result(f"one_arithmetic_{operators()}", result, table(result))


def systems() -> list[System]:
    """Our default cluster, and the same with oneDNN's products."""
    ours = system("tandem", None)
    changed = {"PYTHONPATH": f"{CHANGED}:{ROOT}"}
    return [
        replace(ours, name=OURS, settings="products with the stored weights"),
        replace(ours, name=ONEDNN, settings="oneDNN's products, in bfloat16", environment=changed),
    ]


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rounds: dict[str, list[Round]] = result["rounds"]
    found = round_ratios(rounds[OURS], rounds[ONEDNN], "output_tokens_per_s")
    lines = [
        "# What one arithmetic costs",
        "",
        f"{STREAMS} streams at a time, {PROMPTS.input_len} tokens in, {PROMPTS.output_len} out, {result['requests']} requests "
        f"in each of {len(found)} rounds; medians, lowest to highest in brackets.",
        "",
        "| products | output tokens/s | TTFT p50 | TPOT p50 |",
        "|---|---|---|---|",
    ]
    for name, each in rounds.items():
        speeds = spread([one["output_tokens_per_s"] for one in each])
        lines.append(f"| {name} | {speeds} | {median(each, 'ttft_p50_ms'):.0f} ms | {median(each, 'tpot_p50_ms'):.0f} ms |")
    lines += ["", f"With one arithmetic there are {spread(found, 2)} times as many tokens/s, round by round."]
    return "\n".join([*lines, "", origin(result, "one_arithmetic")])


if __name__ == "__main__":
    main()
