"""What copies of running streams' KV cost: `python -m benchmarks.copies`, on an idle machine.

Sixteen streams over HTTP on a cluster with two decode workers, each followed by the next as long as there are requests; with
`decode.copy_every_tokens` as it is, and with 0, in turns. Medians of the rounds, and of the ratios of each. How many copies
there were is what the cluster's metrics say.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.rounds import Round, compare, median, origin, round_ratios, spread
from benchmarks.lib.servers import TANDEM, System, serving
from configs.schema import DecodeConfig

STREAMS = 16
PROMPTS = RandomPrompts(128, 256)
EVERY = DecodeConfig().copy_every_tokens
"""As it is by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4 * STREAMS, help="in each round")
    parser.add_argument("--port", type=int, default=8127)
    add_state(parser)
    options = parser.parse_args()
    journal = journal_of(parser, options)
    with tempfile.TemporaryDirectory() as folder:
        systems = [with_copies(Path(folder), every) for every in (EVERY, 0)]
        found = compare(
            systems, options.rounds, journal, lambda system, seed: measure(system, options.port, options.requests, seed)
        )
    result = {"streams": STREAMS, "requests": options.requests, **found}
    write_result("copies", result, table(result))


def with_copies(folder: Path, every: int) -> System:
    config = folder / f"{every}.yaml"
    config.write_text(f"decode: {{workers: 2, copy_every_tokens: {every}}}\n")
    settings = f"a copy every {every} tokens" if every else "no copies"
    return System(
        name=settings,
        settings=settings,
        command=[TANDEM, "serve", "--config", str(config)],
        environment={"PYTHONPATH": str(ROOT)},
    )


async def measure(system: System, port: int, requests: int, seed: int) -> Round:
    """One round, on a fresh cluster. Raises RuntimeError if a request fails."""
    with serving(system, port) as url:
        await warm_up(url)
        before = await copies(url)
        found = await put_load(bench_options(url, PROMPTS, num_prompts=requests, seed=seed, max_concurrency=STREAMS))
        made = await copies(url) - before
    if failed := found.figures["failed"]:
        raise RuntimeError(f"{failed} requests failed")
    return {
        "output_tokens_per_s": found.figures["output_throughput"],
        "itl_p50_ms": found.figures["p50_itl_ms"],
        "itl_p99_ms": found.figures["p99_itl_ms"],
        "copies": made,
    }


async def copies(url: str) -> float:
    """Made so far."""
    async with httpx.AsyncClient(base_url=url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    made = [line for line in lines if line.startswith("tandem:kv_copies_total") and 'outcome="copied"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in made)


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rounds: dict[str, list[Round]] = result["rounds"]
    plain = list(rounds)[-1]
    lines = [
        f"{result['streams']} streams at a time, {PROMPTS.input_len} tokens in, {PROMPTS.output_len} out, {result['requests']} "
        f"requests in each of {len(rounds[plain])} rounds, 2 decode workers; medians, lowest to highest in brackets.",
        "",
        "| | output tokens/s | share of that without | ITL p50 | ITL p99 | copies in a round |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        speeds = [each["output_tokens_per_s"] for each in found]
        share = statistics.median(round_ratios(found, rounds[plain], "output_tokens_per_s"))
        times = " | ".join(f"{median(found, figure):.0f} ms" for figure in ("itl_p50_ms", "itl_p99_ms"))
        lines.append(f"| {name} | {spread(speeds)} | {share:.2f} | {times} | {median(found, 'copies'):.0f} |")
    return "\n".join([*lines, "", origin(result, "copies")])


if __name__ == "__main__":
    main()
