"""Time to the first token with `disaggregation` always, never and auto: `python -m benchmarks.conditional`, on an idle machine.

Clusters of one decode worker on one core; always and auto have a prefill worker on another one, so that only the decision
differs. They take turns, each with a fresh cluster that is put under load cell by cell: short and long prompts, at a low and a
high rate. Nobody shares a prefix. `auto` should never be above 1.1 times the better of the other two.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.lib.environment import ROOT, operators, write_result
from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.servers import TANDEM, System, serving, turns

MODES = ("always", "never", "auto")
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Cell:
    name: str
    prompt_tokens: int
    rate: float
    """Requests per second."""


CELLS = (
    Cell("short, low", 64, 1.0),
    Cell("short, high", 64, 8.0),
    Cell("long, low", 1024, 0.25),
    Cell("long, high", 1024, 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of load, each time")
    parser.add_argument("--port", type=int, default=8131)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        systems = [one_core_each(mode, Path(folder)) for mode in MODES]
        result = asyncio.run(measure(systems, options.port, options.rounds, options.seconds))
    write_result(f"conditional_{operators()}", result, table(result["cells"]))


async def measure(systems: Sequence[System], port: int, rounds: int, seconds: float) -> dict[str, Any]:
    ttfts: dict[str, dict[str, list[float]]] = {cell.name: {mode: [] for mode in MODES} for cell in CELLS}
    decisions = {cell.name: Counter[str]() for cell in CELLS}
    failed = 0
    for number, system in turns(systems, range(rounds)):
        with serving(system, port) as url:
            await warm_up(url)
            for cell in CELLS:
                options = bench_options(
                    url,
                    RandomPrompts(cell.prompt_tokens, ANSWER_TOKENS),
                    num_prompts=max(4, round(cell.rate * seconds)),
                    request_rate=cell.rate,
                    num_warmups=2,
                    seed=100 * number + CELLS.index(cell),
                )
                before = await decided(url)
                found = await put_load(options)
                if system.name == "auto":
                    decisions[cell.name].update(await decided(url) - before)
                ttfts[cell.name][system.name] += [record.ttft for record in found.records if record.ttft is not None]
                failed += sum(not record.ok for record in found.records)
    cells = {name: {mode: figures(values) for mode, values in modes.items()} for name, modes in ttfts.items()}
    return {"cells": cells, "decided": decisions, "failed": failed, "rounds": rounds, "seconds": seconds}


def figures(ttfts: list[float]) -> dict[str, float]:
    """In seconds, of all rounds together."""
    return {"p50": float(np.percentile(ttfts, 50)), "p99": float(np.percentile(ttfts, 99)), "count": len(ttfts)}


def table(cells: dict[str, dict[str, dict[str, float]]]) -> str:
    """Milliseconds, and auto beside the better of the other two, as Markdown."""
    lines = ["| | | always | never | auto | auto / better |", "|---|---|---|---|---|---|"]
    for name, modes in cells.items():
        for quantile in ("p50", "p99"):
            always, never, auto = (modes[mode][quantile] for mode in MODES)
            ratio = auto / min(always, never)
            milliseconds = " | ".join(f"{1000 * value:.0f} ms" for value in (always, never, auto))
            lines.append(f"| {name} | {quantile} | {milliseconds} | {ratio:.2f} |")
    return "\n".join(lines)


def one_core_each(mode: str, folder: Path) -> System:
    """A cluster with one core for each worker; its configuration is kept in this folder."""
    config: dict[str, Any] = {"disaggregation": mode, "decode": {"threads": 1}}
    if mode != "never":
        config["prefill"] = {"threads": 1}
    file = folder / f"{mode}.yaml"
    file.write_text(yaml.safe_dump(config))
    return System(
        name=mode,
        settings="one core for each worker",
        command=[TANDEM, "serve", "--config", str(file)],
        environment={"PYTHONPATH": str(ROOT)},
    )


async def decided(url: str) -> Counter[str]:
    """How many prompts were computed here, where they were decoded, and how many there, at a prefill worker."""
    async with httpx.AsyncClient(timeout=10) as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    counts = [line for line in lines if line.startswith("tandem:disaggregation_decisions_total")]
    return Counter(
        {where: int(float(line.split()[-1])) for line in counts for where in ("here", "there") if f'"{where}"' in line}
    )


if __name__ == "__main__":
    main()
