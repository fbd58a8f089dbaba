"""Workers chosen by what they have cached: `python -m benchmarks.cache_routing --traces DIR`, on an idle machine.

A paced cluster of 16 prefill and 16 decode workers (docs/paced.md) gets the first minutes of Mooncake's conversations at their
own pace, whole: their lengths, and blocks that are equal where the trace's are. Once workers are chosen by cache and load, once
by load alone (`--routing`), each time in a fresh cluster. Beside it stands what any cache could have (`lib/cache_bounds.py`).

A request is in time if its first token comes within twice the p90 of requests that are alone, none of whose tokens are cached
(by the profile), and the others within 50 ms each.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.cache_bounds import hit_share
from benchmarks.lib.conversations import MINUTES, TPOT_S, TRACE, WORKERS, conversations, limit_s
from benchmarks.lib.environment import write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import Trace, bench_options, put_load
from benchmarks.lib.quantiles import quantile
from benchmarks.lib.servers import HOST, cluster
from configs.paced.profile import DEFAULT_PROFILE, load_paced_profile
from loadtest.datasets import TraceRow
from loadtest.records import RequestRecord

ROUTINGS = ("cache", "load")
TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--traces", type=Path, required=True, help="the folder that has Mooncake's trace")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the trace")
    parser.add_argument("--time-scale", type=float, default=1.0, help="the trace's times, multiplied by it")
    add_state(parser)
    given = parser.parse_args()
    path = given.traces / TRACE
    rows = conversations(path, given.minutes)
    journal = journal_of(parser, given)
    limit = limit_s(rows)
    runs = {}
    for routing in ROUTINGS:
        measure = partial(run, given.port, ("--routing", routing), path, len(rows), given.time_scale, limit)
        runs[routing] = journal.once(routing, measure)
    result = {"minutes": given.minutes, "time_scale": given.time_scale, "limit_s": limit}
    result |= {"runs": runs, "bounds": bounds(rows)}
    write_result("cache_routing", result, table(result, rows))


def run(port: int, flags: Sequence[str], path: Path, num_rows: int, time_scale: float, limit: float) -> dict[str, Any]:
    """A cluster with these flags: what was cached, and what its requests saw."""
    with cluster(port, "--engine", "paced", "--prefill", str(WORKERS), "--decode", str(WORKERS), *flags):
        options = bench_options(
            f"http://{HOST}:{port}",
            Trace("mooncake", path, 1.0),
            num_prompts=num_rows,
            seed=0,
            timeout_s=TIMEOUT_S,
            time_scale=time_scale,
        )
        records = asyncio.run(put_load(options)).records
    done = [record for record in records if record.ok]
    ttft_s = [record.ttft for record in done if record.ttft is not None]
    tpot_s = [record.tpot for record in done if record.tpot is not None]
    missed = [float((record.prompt_tokens or 0) - (record.cached_tokens or 0)) for record in done]
    return {
        "requests": len(records),
        "failed": len(records) - len(done),
        "hit_share": 1 - sum(missed) / sum(record.prompt_tokens or 0 for record in done),
        "missed_p50": quantile(missed, 0.5),
        "missed_p99": quantile(missed, 0.99),
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "tpot_p50_s": quantile(tpot_s, 0.5),
        "tpot_p99_s": quantile(tpot_s, 0.99),
        "in_time": sum(in_time(record, limit) for record in records) / len(records),
        "client_late_p99_s": quantile([record.lateness for record in records], 0.99),
    }


def in_time(record: RequestRecord, limit: float) -> bool:
    """Whether a request met both limits. One that failed has not."""
    return record.ok and (record.ttft or 0.0) <= limit and (record.tpot or 0.0) <= TPOT_S


def bounds(rows: Sequence[TraceRow]) -> dict[str, float]:
    """Shares of the prompt tokens that caches could have had at most."""
    pool = load_paced_profile(DEFAULT_PROFILE).kv_cache_tokens
    return {
        "one cache without end": hit_share(rows, None),
        "one cache as large as all pools of prefill workers": hit_share(rows, WORKERS * pool),
        "caches of prefill workers, chosen at random": hit_share(rows, pool, WORKERS),
    }


def table(result: dict[str, Any], rows: Sequence[TraceRow]) -> str:
    runs, limit_s = result["runs"], result["limit_s"]
    lines = [
        "# Workers chosen by what they have cached",
        "",
        f"The first {result['minutes']:g} minutes of Mooncake's conversations, {len(rows)} requests, at "
        f"{result['time_scale']:g} times their intervals; {WORKERS} prefill and {WORKERS} decode workers, paced as "
        f"{DEFAULT_PROFILE}, an estimate.",
        "",
        "| chosen by | cached | uncached p50 | uncached p99 | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | in time | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for routing, name in (("cache", "cache and load"), ("load", "load alone")):
        run = runs[routing]
        lines.append(
            f"| {name} | {run['hit_share']:.1%} | {run['missed_p50']:.0f} | {run['missed_p99']:.0f} "
            f"| {run['ttft_p50_s'] * 1e3:.0f} ms | {run['ttft_p99_s'] * 1e3:.0f} ms | {run['tpot_p50_s'] * 1e3:.1f} ms "
            f"| {run['tpot_p99_s'] * 1e3:.1f} ms | {run['in_time']:.1%} | {run['failed']} |"
        )
    lines += ["", f"In time: a first token within {limit_s:.2f} s, and {TPOT_S * 1e3:.0f} ms a token.", ""]
    lines += ["| what could be cached at most | tokens |", "|---|---|"]
    lines += [f"| {name} | {share:.1%} |" for name, share in result["bounds"].items()]
    late_ms = max(run["client_late_p99_s"] for run in runs.values()) * 1e3
    lines += ["", f"The client sent its requests at most {late_ms:.0f} ms late (p99).", ""]
    lines += ["Command: `python -m benchmarks.cache_routing --traces DIR`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
