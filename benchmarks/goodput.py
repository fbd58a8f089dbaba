"""Load that meets its limits, beside others: `python -m benchmarks.goodput --traces DIR --peer-env DIR`, on an idle machine.

    workload ──► seed ──► system: fresh server ──► warm-up ──► runs at rates that `benchmarks.lib.slo` asks for ──► results
    written

Every seed is a round in which all systems take their turn, each with all cores; the same prompts arrive at the same moments
for all of them. Results are merged with those that are there, so parts can be run on their own (`--workloads`, `--systems`,
`--seeds`), and an interrupted run loses one turn: with `--state FILE` the same command goes on there. `--runs` bounds a turn:
what is not known by then stays between a good rate and a bad one. `--report` measures nothing, and writes table and pictures
anew.

DIR of the traces has azure_llm_2023_conv.csv, azure_llm_2023_code.csv and mooncake_conversation.jsonl
(`benchmarks.lib.workloads`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib import goodput_report
from benchmarks.lib.environment import RESULTS, environment, operators, save_result
from benchmarks.lib.goodput_report import Entry
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import Prompts, bench_options, put_load, warm_up
from benchmarks.lib.servers import System, add_options, chosen, serving, turns
from benchmarks.lib.slo import LOWEST_STEP, SLOS, STEPS_PER_DOUBLING, bracket, count_met, next_step, rate_of
from benchmarks.lib.workloads import TRACES, WORKLOADS, described, prompts_of
from loadtest.bench import Finished

NAME = f"goodput_{operators()}"
TIMEOUT_S = 32.0
"""An answer that takes longer has missed all limits: none of these workloads has more than 240 tokens in one, and the loosest
limits are 2 s and 120 ms a token."""
LEAST_REQUESTS = 20
FIRST_STEP = STEPS_PER_DOUBLING
"""Two requests per second; a system's later seeds begin where its first one ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="a comma between two")
    parser.add_argument("--traces", type=Path, help="folder of the traces")
    parser.add_argument("--seeds", default="0,1,2", help="a comma between two")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load at each rate")
    parser.add_argument("--runs", type=int, default=14, help="at most, for each workload, system and seed")
    parser.add_argument("--report", action="store_true", help="of what is known, without measuring")
    add_options(parser)
    add_state(parser)
    options = parser.parse_args()
    known = load()
    names = options.workloads.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"--workloads: {', '.join(sorted(unknown))} is none of {', '.join(WORKLOADS)}")
    if options.traces is None and set(names) & set(TRACES) and not options.report:
        parser.error("--workloads: traces need --traces")
    if options.report:
        print(save(known))
        return
    systems, seeds = chosen(parser, options), [int(seed) for seed in options.seeds.split(",")]
    journal, load_average = journal_of(parser, options), os.getloadavg()[0]
    for name in names:
        for seed, system in turns(systems, seeds):
            turn = f"{name}, seed {seed}, {system.name}"
            print(f"==> {turn}", flush=True)
            first = first_step(known, name, system.name)
            entry = journal.once(turn, partial(entry_of, name, seed, system, first, load_average, options))
            known = goodput_report.merge(known, entry)
            save(known)


def entry_of(name: str, seed: int, system: System, first: int, load_average: float, options: Any) -> Entry:
    """Measure one turn: a workload, seed and system."""
    return {
        "workload": name,
        "system": system.name,
        "seed": seed,
        "settings": system.settings,
        "prompts": described(name),
        "seconds": options.seconds,
        "load_average": load_average,
        "environment": environment(),
        "runs": asyncio.run(measure(system, prompts_of(name, options.traces), seed, first, options)),
    }


def load() -> list[Entry]:
    """What earlier runs have found."""
    path = RESULTS / f"{NAME}.json"
    entries: list[Entry] = json.loads(path.read_text())["entries"] if path.exists() else []
    return entries


def save(entries: list[Entry]) -> str:
    """All of it: the file, the pictures, and the table, which is returned."""
    settings = {entry["system"]: entry["settings"] for entry in entries}
    table = goodput_report.table(NAME, entries, settings)
    save_result(NAME, {"entries": entries}, table)
    for workload, systems in goodput_report.by_workload(entries).items():
        goodput_report.draw(RESULTS / goodput_report.picture_name(NAME, workload), workload, systems)
    return table


def requests_at(rate: float, seconds: float) -> int:
    """Of one run."""
    return max(LEAST_REQUESTS, round(rate * seconds))


def seed_of(seed: int, step: int) -> int:
    """Return the seed of a run's prompts: all systems get the same ones, and each rate others, which no cache has."""
    return 1000 * seed + step - LOWEST_STEP


def first_step(known: list[Entry], workload: str, system: str) -> int:
    """Where another seed found the goodput of the first SLO, to save runs."""
    for entry in known:
        if (entry["workload"], entry["system"]) == (workload, system):
            good, _ = bracket(goodput_report.runs_of(entry), SLOS[0])
            if good is not None:
                return good
    return FIRST_STEP


async def measure(system: System, prompts: Prompts, seed: int, first: int, options: Any) -> list[Mapping[str, Any]]:
    """The runs of one turn."""
    runs: list[Mapping[str, Any]] = []
    with serving(system, options.port) as url:
        await warm_up(url)
        while len(runs) < options.runs:
            step = next_step(goodput_report.runs_of({"runs": runs}), first)
            if step is None:
                break
            load = bench_options(
                url,
                prompts,
                num_prompts=requests_at(rate_of(step), options.seconds),
                request_rate=rate_of(step),
                seed=seed_of(seed, step),
                timeout_s=TIMEOUT_S,
            )
            found = await put_load(load)
            runs.append(run_of(step, found))
            met = runs[-1]["met"][SLOS[0].name] / runs[-1]["sent"]
            print(f"{rate_of(step):6.2f} requests/s: {met:.0%} within {SLOS[0].name}", flush=True)
    return runs


def run_of(step: int, found: Finished) -> dict[str, Any]:
    """What is kept of a run."""
    figures = found.figures
    latencies = [f"{percentile}_{metric}_ms" for metric in ("ttft", "tpot") for percentile in ("p50", "p90")]
    return {
        "step": step,
        "rate": rate_of(step),
        "sent": len(found.records),
        "failed": figures["failed"],
        "requests_per_s": figures["request_throughput"],
        "output_tokens_per_s": figures["output_throughput"],
        **{name: figures[name] for name in latencies},
        "met": count_met(found.records),
        "client_warning": found.client.warning,
    }


if __name__ == "__main__":
    main()
