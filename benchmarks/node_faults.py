"""What do clients notice when a node fails? `python -m benchmarks.node_faults`, on an idle machine; needs redis-server.

A head and two nodes, each with a prefill and a decode worker of the default model in the default format, as machines of their
own (benchmarks/lib/machines.py). Sixteen streams run at a time, greedy and seeded ones, each followed by the next, while

- a node is killed, and started again;
- a node loses its power: it vanishes without a word;
- a node is cut off from all others for a lease and five seconds, and comes back;
- the two nodes are cut off from each other, and the head reaches both;
- the head is lost, and its address, with what Redis has kept, moves to another machine. Half of the clients come back to their
  streams (`x-tandem-resumable`), the others ask anew.

Before, the same requests run undisturbed. Every answer must be the undisturbed one: token ids, text, finish reason. A stream's
gap is the longest time between two of its events; those count that ran during a fault. Partitions are measured with the default
lease and with one of three seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import operators, save_result
from benchmarks.lib.journal import Journal, add_state, journal_of
from benchmarks.lib.lanes import Lanes, ReturningLanes
from benchmarks.lib.machines import enter_own_network
from benchmarks.lib.node_site import FLOWING_S, NODES, Site
from benchmarks.lib.quantiles import quantile
from benchmarks.lib.ray_nodes import ADMIN_KEY, REDIS, RayNodes, ray_nodes
from benchmarks.lib.streams import Answered, Request
from configs.schema import LimitsConfig

STREAMS = 16
DIFFERENT = 32
KINDS = ("greedy", "seeded")
CALM_S = (2.0, 5.0)
"""Before a fault, from when all workers are up and every stream has gone on."""
CONFIG = """
limits: {{lease_s: {lease_s}}}
prefill: {{workers: 2, kv_cache_tokens: 16384, resources: {{tandem_prefill: 1}}}}
decode: {{workers: 2, kv_cache_tokens: 16384, resources: {{tandem_decode: 1}}}}
"""


@dataclass(frozen=True)
class Run:
    """A fault, and how often it happens."""

    fault: str
    times: int

    def name(self, lease_s: float) -> str:
        return f"{NAMES[self.fault]}, lease {lease_s:g} s"


NAMES = {
    "kill": "a node killed",
    "power": "a node without power",
    "cut": "a node cut off",
    "part": "two nodes cut off from each other",
    "head": "the head lost",
}
DEFAULT_LEASE_S = LimitsConfig().lease_s
RUNS = {
    DEFAULT_LEASE_S: (Run("kill", 8), Run("power", 2), Run("cut", 4), Run("part", 3), Run("head", 3)),
    3.0: (Run("kill", 4), Run("power", 2), Run("cut", 6), Run("part", 3)),
}
"""By lease in seconds; each on a cluster of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the faults; at least one of each")
    parser.add_argument("--faults", default=",".join(NAMES), help="some of these, with commas")
    parser.add_argument("--leases", default=",".join(f"{lease_s:g}" for lease_s in RUNS), help="some of these, with commas")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, and no result")
    add_state(parser)
    options = parser.parse_args()
    if unknown := [fault for fault in options.faults.split(",") if fault not in NAMES]:
        parser.error(f"--faults: {', '.join(unknown)} is none of {', '.join(NAMES)}")
    if REDIS is None:
        parser.error("redis-server is not installed")
    enter_own_network(parser, "benchmarks.node_faults")
    rows = measure(options, journal_of(parser, options))
    if options.rows is not None:
        options.rows.write_text(json.dumps(rows))
    else:
        save_result(f"node_faults_{operators()}", {"streams": STREAMS, "runs": rows}, table(rows, options.tokens))
    print(table(rows, options.tokens))


def measure(options: argparse.Namespace, journal: Journal) -> list[dict[str, Any]]:
    """One row for each run. Those that the journal has need no cluster."""
    rows = []
    for lease_s in map(float, options.leases.split(",")):
        runs = [run for run in RUNS[lease_s] if run.fault in options.faults.split(",")]
        turn = partial(measure_lease, lease_s, runs, options)
        rows += journal.once(f"lease {lease_s:g} s", turn)
    return rows


def measure_lease(lease_s: float, runs: Sequence[Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each of these runs, on a cluster of their own."""
    with ray_nodes(len(NODES), CONFIG.format(lease_s=lease_s)) as nodes:
        return asyncio.run(_measure_runs(nodes, lease_s, runs, options))


async def _measure_runs(
    nodes: RayNodes, lease_s: float, runs: Sequence[Run], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    limits = httpx.Limits(max_connections=4 * STREAMS)
    key = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        httpx.AsyncClient(base_url=nodes.url, timeout=httpx.Timeout(300, connect=5), limits=limits) as client,
        httpx.AsyncClient(base_url=nodes.url, timeout=10, headers=key) as operator,
    ):
        for run in runs:
            site = Site(nodes, client, operator, lease_s)
            rows.append(await one_run(site, run, max(1, round(run.times * options.scale)), options.tokens))
            print(table(rows[-1:], options.tokens), flush=True)
    return rows


async def one_run(site: Site, run: Run, times: int, tokens: int) -> dict[str, Any]:
    """The same requests undisturbed, and then under this many faults."""
    requests = [Request(KINDS[n % len(KINDS)], n, tokens) for n in range(DIFFERENT)]
    await site.until_whole()
    undisturbed = await _undisturbed(site.client, requests)
    expected = {answer.request: answer for answer in undisturbed}
    resumed = await site.counted("resumed_streams_total")
    lanes = ReturningLanes(site.client, requests) if run.fault == "head" else Lanes(site.client, requests)
    await _disturbed(site, lanes, run.fault, times, random.Random(run.fault))
    differences = [
        f"request {answer.request.number}: {answer.failure or difference}"
        for answer in lanes.answers
        if (difference := answer.differs(expected[answer.request])) or answer.failure
    ]
    touched = [answer for answer in lanes.answers if answer.times and site.touched(answer)]
    returned = vars(lanes.counts) if isinstance(lanes, ReturningLanes) else {}
    return {
        "fault": run.fault,
        "name": run.name(site.lease_s),
        "lease_s": site.lease_s,
        "faults": times,
        "streams": len(lanes.answers),
        "finished": sum(answer.failure is None for answer in lanes.answers),
        "exact": len(lanes.answers) - len(differences),
        # A head that is lost takes its counters along.
        "resumed": returned["resumed"] if returned else int(await site.counted("resumed_streams_total") - resumed),
        "asked_anew": returned.get("asked_anew", 0),
        "differences": differences,
        "longest_gaps_s": [answer.longest_gap() for answer in touched],
        "first_tokens_s": [answer.first_token_s() for answer in touched],
        "undisturbed_gaps_s": [answer.longest_gap() for answer in undisturbed],
        "no_http_s": site.no_http_s,
        "whole_s": site.whole_s,
        "taken_up": site.taken_up,
        "leaks": await site.leaks(),
    }


async def _undisturbed(client: httpx.AsyncClient, requests: Sequence[Request]) -> list[Answered]:
    slots = asyncio.Semaphore(STREAMS)

    async def one(request: Request) -> Answered:
        async with slots:
            return await Answered(request).run(client)

    answers = await asyncio.gather(*(one(request) for request in requests))
    assert all(answer.failure is None for answer in answers), [answer.failure for answer in answers]
    return list(answers)


async def _disturbed(site: Site, lanes: Lanes, fault: str, times: int, rng: random.Random) -> None:
    """Run the load, and this many faults under it; all of it to its end."""
    async with asyncio.TaskGroup() as tasks:
        for lane in range(STREAMS):
            tasks.create_task(lanes.lane(lane))
        for number in range(times):
            await site.until_whole()
            await lanes.until_flowing(FLOWING_S)
            await asyncio.sleep(rng.uniform(*CALM_S))
            print(f"{NAMES[fault]}: {number + 1} of {times}", flush=True)
            await site.befall(fault, lanes, rng)
        lanes.over = True


def table(rows: Sequence[dict[str, Any]], tokens: int) -> str:
    """Markdown; gaps are the longest of each stream that a fault touched."""
    lines = [
        "| fault | faults | streams | finished | exact | resumed | asked anew | gap p50 | p99 | max | first token max "
        "| undisturbed gap max | no HTTP max | whole again max | leaks |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gaps = row["longest_gaps_s"]
        numbers = [row[key] for key in ("faults", "streams", "finished", "exact", "resumed", "asked_anew")]
        times = [statistics.median(gaps), quantile(gaps), max(gaps), max(row["first_tokens_s"]), max(row["undisturbed_gaps_s"])]
        cells = [row["name"], *map(str, numbers), *(f"{seconds:.2f} s" for seconds in times)]
        cells += [f"{max(row[key]):.1f} s" if row[key] else "none" for key in ("no_http_s", "whole_s")]
        lines.append(f"| {' | '.join([*cells, str(len(row['leaks']))])} |")
    notes = [f"- {row['name']}: {each}" for row in rows for each in row["differences"]]
    notes += [
        f"- {row['name']}: {sum(row['taken_up'])} of {row['faults']} times with the same lives of all workers"
        for row in rows
        if row["taken_up"]
    ]
    about = (
        f"{STREAMS} streams of {tokens} tokens at a time, on a head and {len(NODES)} nodes with a prefill and a decode worker "
        "each. Gaps and first tokens are of streams that a fault touched. Whole again: from the end of a fault, with the node "
        "started again or connected, until all workers take requests."
    )
    return "\n".join([*lines, "", about, *notes])


if __name__ == "__main__":
    main()
