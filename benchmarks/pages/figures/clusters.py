"""Figures of clusters: failures, caches, and clusters that grow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.chaos import NOBODY, REFUSED
from benchmarks.lib.quantiles import quantile
from benchmarks.pages.figure import Figure, at_least, at_most

Result = Mapping[str, Any]
_SOURCES = {"peer": ("another worker's pool", 0.3), "memory": ("the memory tier", 0.3), "disk": ("the disk tier", 0.4)}


def kills(result: Result, kind: str) -> Sequence[Figure]:
    """All kinds of requests together, in the default format."""
    runs = [run for run in result["runs"] if "float32" not in run["name"]]
    return [
        _exact(runs),
        Figure("decode workers killed", sum(run["kills"] for run in runs), digits=0, goal=at_least(200)),
        Figure("longest gap of a stream", max(max(run["longest_gaps_s"]) for run in runs), "s"),
    ]


def node_faults(result: Result, kind: str) -> Sequence[Figure]:
    """All faults together, and the gaps of each kind of fault."""
    runs = result["runs"]
    return [
        _exact(runs),
        Figure("faults", sum(run["faults"] for run in runs), digits=0),
        *(
            Figure(f"gap p99, {run['name']}", quantile(run["longest_gaps_s"]), "s", 1, goal=at_most(bound_s))
            for run in runs
            if (bound_s := _gap_bound_s(run)) is not None
        ),
    ]


def _gap_bound_s(run: Mapping[str, Any]) -> float | None:
    """The longest that a stream should stop for a fault; None for a lost head, which has no such goal."""
    if run["fault"] == "kill":
        return 5.0
    return float(run["lease_s"]) + 3 if run["fault"] in ("cut", "part") else None


def _exact(runs: Sequence[Mapping[str, Any]]) -> Figure:
    share = sum(run["exact"] for run in runs) / sum(run["streams"] for run in runs)
    return Figure("share of streams with the undisturbed tokens", share, digits=4, goal=at_least(1))


def migration(result: Result, kind: str) -> Sequence[Figure]:
    """In the default type."""
    rounds = result["rounds"]["bfloat16"]
    return [
        Figure(
            "streams with the same tokens", sum(each["exact"] for each in rounds), f"of {len(rounds) * result['streams']}", 0
        ),
        Figure("a drain takes, median", statistics.median(each["drained_s"] for each in rounds), "s"),
        Figure("longest gap of a stream", max(max(each["pause_s"]) for each in rounds), "s"),
    ]


def role_changes(result: Result, kind: str) -> Sequence[Figure]:
    """Medians. What a start takes is the worker's matter; what the cluster adds to it has a goal."""
    flips = result["flips"]
    took_s = {name: statistics.median(each["took_s"][name] for each in flips) for name in flips[0]["took_s"]}
    return [
        *(Figure(f"a flip, {name}", seconds, "s", goal=at_most(1)) for name, seconds in took_s.items()),
        Figure(
            "streams beside a flip with the undisturbed tokens",
            sum(each["exact"] for each in flips) / (len(flips) * result["streams"]),
            digits=4,
            goal=at_least(1),
        ),
        Figure(
            "from zero, first answer after the worker was ready",
            statistics.median(each["answer_s"] - each["ready_s"] for each in result["started"]),
            "s",
            goal=at_most(1),
        ),
        Figure(
            "from zero with a standby", statistics.median(each["answer_s"] for each in result["standby"]), "s", goal=at_most(2)
        ),
    ]


def paced_kills(result: Result, kind: str) -> Sequence[Figure]:
    """Nothing may be wrong."""
    return [
        Figure("minutes of faults", result["minutes"], digits=0, goal=at_least(20)),
        Figure(f"wrong answers, of {result['requests']:,}", result["wrong"], digits=0, goal=at_most(0)),
        Figure("failed requests", sum(result["failures"].values()), digits=0, goal=at_most(0)),
        Figure("leaks found by the audit", len(result["leaks"]), digits=0, goal=at_most(0)),
    ]


def soak(result: Result, kind: str) -> Sequence[Figure]:
    """Whether anything went wrong."""
    outcomes = result["outcomes"]
    none = (NOBODY, REFUSED, "connections")
    faults = sum(count for name, count in result["faults"].items() if not name.startswith(none))
    said = f"{outcomes.get('exact', 0):,} answers and {outcomes.get('cut off', 0):,} beginnings"
    return [
        Figure("minutes of faults with everything on", result["seconds"] / 60, digits=0, goal=at_least(60)),
        Figure("faults of workers, nodes and roles", faults, digits=0),
        Figure(f"wrong ones, beside {said} that were right", _wrong(outcomes), digits=0, goal=at_most(0)),
        Figure("problems: wrong answers, leaks, processes that grew", len(result["problems"]), digits=0, goal=at_most(0)),
    ]


def _wrong(outcomes: Mapping[str, int]) -> int:
    return sum(count for outcome, count in outcomes.items() if outcome not in ("exact", "cut off"))


def cut_streams(result: Result, kind: str) -> Sequence[Figure]:
    """What clients leave behind."""
    return [
        Figure("leaks found by the audit", len(result["leaks"]), digits=0, goal=at_most(0)),
        Figure("growth of a process's memory, most", 100 * max(result["growth"].values()), "%", 1, goal=at_most(5)),
    ]


def handoff(result: Result, kind: str) -> Sequence[Figure]:
    """What a first token waits for its handoff, over each transport."""
    figures = []
    for name, found in result["first_tokens"].items():
        exposed = [one - other for one, other in zip(found["handoff_s"], found["alone_s"], strict=True)]
        figures.append(Figure(f"a first token comes later, {name}, median", 1e3 * statistics.median(exposed), "ms", 1))
    return figures


def cache_routing(result: Result, kind: str) -> Sequence[Figure]:
    """By cache and load, beside load alone and what any cache could have."""
    cache, load = result["runs"]["cache"], result["runs"]["load"]
    bound = result["bounds"]["one cache without end"]  # decode workers cache prompts, too
    return [
        Figure("cached tokens, by cache / by load alone", cache["hit_share"] / load["hit_share"], goal=at_least(3.5)),
        Figure("cached tokens / those of one cache without end", cache["hit_share"] / bound, goal=at_least(0.85)),
        Figure("TTFT p99, by cache / by load alone", cache["ttft_p99_s"] / load["ttft_p99_s"]),
        Figure("requests in time", 100 * cache["in_time"], "%", 1),
    ]


def cache_tier(result: Result, kind: str) -> Sequence[Figure]:
    """With a memory tier, beside what one cache could have, and the simulator."""
    measured, simulated, gap = result["measured"], result["simulated"], result["gap_closed"]
    times = ("ttft_p50_s", "ttft_p99_s")
    off = max(abs(simulated["tier"][time] / measured[time] - 1) for time in times)
    return [
        Figure(
            "cached tokens / the bound for all pools and the tier", measured["hit_share"] / result["bound"], goal=at_least(0.95)
        ),
        Figure("gap to one ideal cache closed, TTFT p50", 100 * gap["ttft_p50_s"], "%", 0, goal=at_least(80)),
        Figure("gap to one ideal cache closed, TTFT p99", 100 * gap["ttft_p99_s"], "%", 0, goal=at_least(80)),
        Figure("the simulator's TTFT is off by at most", 100 * off, "%", 0, goal=at_most(10)),
    ]


def cache_simulation(result: Result, kind: str) -> Sequence[Figure]:
    """The share of the gap between load alone and one ideal cache that is closed."""
    closed = result["gap_closed"].get("tier", {})
    return [
        Figure(f"gap to one ideal cache closed by a memory tier, {name}", 100 * value, "%", 0) for name, value in closed.items()
    ]


def cache_sources(result: Result, kind: str) -> Sequence[Figure]:
    """What bringing a prompt's KV takes of computing it."""
    figures = []
    for source, (name, goal) in _SOURCES.items():
        run = result["runs"][source]
        ratio = statistics.median(run["brought_s"]) / statistics.median(run["computed_s"])
        figures.append(Figure(f"TTFT from {name} / computed", ratio, digits=3, goal=at_most(goal)))
    return figures


def cached_chats(result: Result, kind: str) -> Sequence[Figure]:
    """Of what could be cached."""
    shares = result["shares"]
    return [
        Figure("cached, of what could be, by cache", 100 * statistics.median(shares["cache"]), "%", 1, goal=at_least(90)),
        Figure("cached, of what could be, by load alone", 100 * statistics.median(shares["load"]), "%", 1),
    ]


def cache_index(result: Result, kind: str) -> Sequence[Figure]:
    """Its size, and the choice of a pair."""
    slowest = max(each["p99"] for each in result["choice_us"].values())
    return [
        Figure("lookup and choice, p99 of the slowest kind", slowest, "µs", 0, goal=at_most(200)),
        Figure("bytes of a block", result["bytes_per_block"], digits=0, goal=at_most(64)),
    ]


def unshared(result: Result, kind: str) -> Sequence[Figure]:
    """The upper ends of the intervals."""
    names = {"s_per_1000": "tokens of 16 streams", "ttft_ms": "a first token"}
    ends = {name: result["costs"][each]["high"] for each, name in names.items()}
    return [Figure(f"with caches and a tier, {name}, upper end of 95 %", end, goal=at_most(1.05)) for name, end in ends.items()]


def prefix_cache(result: Result, kind: str) -> Sequence[Figure]:
    """Of 1,024 tokens 960 are cached."""
    ratio = statistics.median(result["cached_s"]) / statistics.median(result["uncached_s"])
    return [Figure("TTFT of 1,024 tokens, 960 of them cached / none", ratio)]


def paced(result: Result, kind: str) -> Sequence[Figure]:
    """Its start and its memory."""
    return [
        Figure("32 paced workers are ready after", result["ready_s"], "s", 1, goal=at_most(30)),
        Figure("memory after the loads", result["memory_after"] / 2**30, "GiB", goal=at_most(4)),
    ]


def autoscale(result: Result, kind: str) -> Sequence[Figure]:
    """Both scenes."""
    figures = []
    for scene, name in (("hour", "Azure's hour"), ("day", "a synthetic day")):
        if scene not in result:
            continue
        run = result[scene]["runs"]["autoscaler"]
        figures += [
            Figure(f"{name}: requests in time", 100 * run["attainment"], "%", 1, goal=at_least(95)),
            Figure(f"{name}: worker-hours, in those of an oracle", run["beside_oracle"], goal=at_most(1.2)),
        ]
        if scene == "day":
            turns = sum(run["turns"].values())
            figures.append(Figure(f"{name}: changes of direction, both roles", turns, digits=0, goal=at_most(6)))
    return figures


def scale(result: Result, kind: str) -> Sequence[Figure]:
    """The largest cluster."""
    row = result["rows"][-1]
    lost = row["requests"] - row["answered"] - row["refused"]
    return [
        Figure(f"simulated requests with {row['workers']:,} workers", row["requests"], digits=0, goal=at_least(10_000_000)),
        Figure("simulated requests that were lost", lost, digits=0, goal=at_most(0)),
        Figure("choice of a pair, p99", row["choice_us_p99"], "µs", 0),
    ]


EXTRACT = {
    "kills": kills,
    "node_faults": node_faults,
    "migration": migration,
    "role_changes": role_changes,
    "paced_kills": paced_kills,
    "soak": soak,
    "cut_streams": cut_streams,
    "handoff": handoff,
    "cache_routing": cache_routing,
    "cache_tier": cache_tier,
    "cache_simulation": cache_simulation,
    "cache_sources": cache_sources,
    "cached_chats": cached_chats,
    "unshared": unshared,
    "cache_index": cache_index,
    "prefix_cache": prefix_cache,
    "paced": paced,
    "autoscale": autoscale,
    "scale": scale,
}
