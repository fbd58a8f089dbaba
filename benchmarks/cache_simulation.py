"""What caches of a cluster could bring, in virtual time: `python -m benchmarks.cache_simulation --traces DIR [--result PATH]`.

The cluster of `benchmarks.cache_routing`, 16 prefill and 16 decode workers, paced, simulated with the first minutes of
Mooncake's conversations. No processor is the limit here, so `--pace` can be raised until the workers are busy: at 6.5 times the
trace's pace, prefill workers are busy for 70 % of the time when they are chosen by load alone. Modes:

    load     workers are chosen by load alone
    cache    and by what they have cached; blocks are not fetched
    fetch    blocks are fetched from other workers' pools, too
    tier     and read from a memory tier on each node
    ideal    one cache as large as all pools together, without any transfers

A request is in time as in `cache_routing`. Of the gap between load and ideal, the table says how much each mode closes. A mode
takes about a minute. `--pool-tokens` makes the pools smaller, so that a tier has something to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.cache_bounds import hit_share
from benchmarks.lib.conversations import MINUTES, TPOT_S, TRACE, WORKERS, conversations, limit_s
from benchmarks.lib.environment import write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.quantiles import quantile
from configs.loader import load_config
from configs.paced.profile import DEFAULT_PROFILE, PacedProfile, load_paced_profile
from loadtest.datasets import TraceRow
from simulator.cluster import Cluster, Shape
from simulator.profile import Profile
from simulator.request import Request
from simulator.shared import Caching, TierSize
from simulator.workload import block_requests

NAMES = {
    "load": "load alone",
    "cache": "cache and load",
    "fetch": "the same, with fetching",
    "tier": "the same, with a memory tier",
    "ideal": "one cache for all (ideal)",
}
GAPS = ("ttft_p50_s", "ttft_p99_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder that has Mooncake's trace")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the trace")
    parser.add_argument("--pace", type=float, default=1.0, help="how many times faster than in the trace requests come")
    parser.add_argument("--modes", default=",".join(NAMES), help="those to simulate, with commas in between")
    parser.add_argument("--pool-tokens", type=int, default=None, help="tokens of each worker's pool, instead of the profile's")
    parser.add_argument("--memory-gib", type=float, default=512.0, help="of KV in the memory tier of a node")
    parser.add_argument("--nodes", type=int, default=4, help="workers of each role are on them in turn")
    parser.add_argument("--result", type=Path, default=None, help="path of the .json and .md to write, without these endings")
    add_state(parser)
    given = parser.parse_args()
    modes = given.modes.split(",")
    if unknown := set(modes) - NAMES.keys():
        parser.error(f"--modes: {', '.join(sorted(unknown))} is not one of {', '.join(NAMES)}")
    rows = conversations(given.traces / TRACE, given.minutes)
    setting = setting_of(rows, given.pace, given.minutes, given.memory_gib, given.nodes, given.pool_tokens)
    journal = journal_of(parser, given)
    runs = {mode: journal.once(mode, partial(simulated, mode, setting)) for mode in modes}
    result = {name: getattr(given, name) for name in ("minutes", "pace", "memory_gib", "nodes")}
    result |= {"requests": len(setting.rows), "pool_tokens": setting.pool_tokens, "limit_s": setting.limit_s}
    result |= {"runs": runs, "gap_closed": gap_closed(runs), "hit_share_without_end": hit_share(setting.rows, None)}
    if given.result is None:
        print(table(result))
    else:
        write_result(str(given.result.absolute()), result, table(result))


@dataclass(frozen=True)
class Setting:
    """What all modes have in common."""

    rows: Sequence[TraceRow]
    paced: PacedProfile
    pace: float
    pool_tokens: int
    """Size of each worker's pool."""
    tier: TierSize
    window_s: float
    """How long requests come."""
    limit_s: float
    """The latest that a first token is in time."""


def setting_of(
    rows: Sequence[TraceRow], pace: float, minutes: float, memory_gib: float, nodes: int, pool_tokens: int | None = None
) -> Setting:
    """These minutes of requests at so many times their pace. Pools have the profile's size unless `pool_tokens` says another,
    and each node has a memory tier of `memory_gib`.
    """
    paced = load_paced_profile(DEFAULT_PROFILE)
    tier = TierSize(
        num_tokens=int(memory_gib * 2**30 / paced.kv_token_bytes),
        token_s=paced.kv_token_bytes / paced.host_bytes_per_s,
        num_nodes=nodes,
    )
    return Setting(
        rows=rows,
        paced=paced,
        pace=pace,
        pool_tokens=pool_tokens or paced.kv_cache_tokens,
        tier=tier,
        window_s=minutes * 60 / pace,
        limit_s=limit_s(rows),
    )


def simulated(mode: str, setting: Setting) -> dict[str, Any]:
    """One mode: what was cached, what its requests saw, and how busy workers were while requests came."""
    pools = {f"{role}.kv_cache_tokens": setting.pool_tokens for role in ("prefill", "decode")}
    routing = {"routing": "load" if mode == "load" else "cache"}
    config = load_config(None, {"engine": "paced", "paced_profile": DEFAULT_PROFILE, **routing, **pools})
    tier = setting.tier if mode == "tier" else None
    caching = Caching(fetch=mode in ("fetch", "tier"), tier=tier, one_cache=mode == "ideal")
    seen = Seen(setting.limit_s)
    profile = Profile.of_paced(setting.paced)
    cluster = Cluster(Shape(WORKERS, WORKERS), config, profile, seen.ended, caching=caching)
    busy: dict[str, float] = {}

    def look() -> None:
        for role, workers in (("prefill", cluster.prefills), ("decode", cluster.decodes)):
            busy[f"{role}_busy"] = sum(worker.busy_s for worker in workers) / len(workers) / setting.window_s

    cluster.clock.at(setting.window_s, look)
    cluster.run(block_requests(setting.rows, setting.pace))
    cluster.check_integrity()
    here = sum(router.decisions["here"] for router in cluster.routers)
    return seen.summary() | busy | {"computed_at_decode": here / len(setting.rows), "events": cluster.clock.num_events}


class Seen:
    """What became of requests. Their prompts are large and are not kept."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._failed = self._in_time = 0
        self._tokens = self._cached = self._fetched = self._read = 0

    def ended(self, request: Request) -> None:
        """Take a request that was answered or refused."""
        if request.error is not None:
            self._failed += 1
            return
        self._ttft_s.append(request.ttft_s)
        self._tpot_s.append(request.tpot_s)
        self._in_time += request.ttft_s <= self._limit_s and request.tpot_s <= TPOT_S
        self._tokens += len(request.token_ids)
        self._cached += request.cached
        self._fetched += request.brought.peer_tokens
        self._read += request.brought.memory_tokens

    def summary(self) -> dict[str, float]:
        """The figures of all of them. Shares of tokens are of prompt tokens."""
        return {
            "failed": self._failed,
            "hit_share": self._cached / self._tokens,
            "fetched_share": self._fetched / self._tokens,
            "read_share": self._read / self._tokens,
            "ttft_p50_s": quantile(self._ttft_s, 0.5),
            "ttft_p99_s": quantile(self._ttft_s, 0.99),
            "tpot_p50_s": quantile(self._tpot_s, 0.5),
            "tpot_p99_s": quantile(self._tpot_s, 0.99),
            "in_time": self._in_time / (len(self._ttft_s) + self._failed),
        }


def gap_closed(runs: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By mode and figure, the share of the way from load to ideal; empty where one of them is missing, or both are equal."""
    if "load" not in runs or "ideal" not in runs:
        return {}
    load, ideal = runs["load"], runs["ideal"]
    return {
        mode: {name: (load[name] - run[name]) / (load[name] - ideal[name]) for name in GAPS if load[name] != ideal[name]}
        for mode, run in runs.items()
    }


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Caches of a cluster, simulated",
        "",
        f"The first {result['minutes']:g} minutes of Mooncake's conversations, {result['requests']} requests, at "
        f"{result['pace']:g} times their pace, in virtual time; {WORKERS} prefill and {WORKERS} decode workers of "
        f"{DEFAULT_PROFILE}, an estimate, with {result['pool_tokens']:,} tokens of KV each. Memory tier: "
        f"{result['memory_gib']:g} GiB on each of {result['nodes']} nodes.",
        "",
        "| workers chosen by | cached | fetched | read | TTFT p50 | TTFT p99 | gap closed p50 / p99 | TPOT p99 | in time "
        "| prefill busy | decode busy | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, run in result["runs"].items():
        gap = result["gap_closed"].get(mode, {})
        closed = " / ".join(f"{gap[name]:.0%}" if name in gap else "-" for name in GAPS)
        lines.append(
            f"| {NAMES[mode]} | {run['hit_share']:.1%} | {run['fetched_share']:.1%} | {run['read_share']:.1%} "
            f"| {run['ttft_p50_s'] * 1e3:.0f} ms | {run['ttft_p99_s'] * 1e3:.0f} ms | {closed} "
            f"| {run['tpot_p99_s'] * 1e3:.1f} ms | {run['in_time']:.1%} | {run['prefill_busy']:.0%} | {run['decode_busy']:.0%} "
            f"| {run['failed']:.0f} |"
        )
    limits = f"{result['limit_s']:.2f} s, and {TPOT_S * 1e3:.0f} ms a token"
    lines += [
        "",
        "Cached are prompt tokens that the computing worker had in its pool when it began; some of them were fetched from",
        f"another worker's pool, or read from the memory tier. In time: a first token within {limits}. One cache",
        f"without end, in which each prompt is at once, would have {result['hit_share_without_end']:.1%} of the tokens.",
        "",
        f"Command: `python -m benchmarks.cache_simulation --traces DIR --minutes {result['minutes']:g} "
        f"--pace {result['pace']:g} --pool-tokens {result['pool_tokens']} --memory-gib {result['memory_gib']:g} "
        f"--nodes {result['nodes']} --result PATH`",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
