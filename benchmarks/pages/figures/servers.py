"""Figures of servers under load, beside others and alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.goodput_report import by_workload, goodputs
from benchmarks.lib.slo import PAIRS, Slo
from benchmarks.pages.figure import Figure, at_least, at_most

Result = Mapping[str, Any]
VLLM = "vllm:128"
_GOODPUT_GOALS = {(500, 30): 2.0, (500, 40): 1.5, (1000, 60): 1.3}


def median_of(result: Result, system: str, figure: str) -> float:
    """Return the median of a figure over a system's rounds."""
    return float(statistics.median(each[figure] for each in result["rounds"][system]))


def rates(result: Result) -> dict[str, float]:
    """Return the output tokens per second of each system."""
    if "rounds" not in result:  # one result's rounds are lost
        return {name: float(value) for name, value in result["output_tokens_per_s"].items()}
    return {system: median_of(result, system, "output_tokens_per_s") for system in result["rounds"]}


def version_of(result: Result, system: str) -> str:
    """Return what the settings of a peer say of its version, or its name."""
    return str(result.get("settings", {}).get(system, "vLLM")).split(",")[0]


def throughput(result: Result, kind: str) -> Sequence[Figure]:
    """Output tokens per second of one prefill and one decode worker, and beside the best of vLLM."""
    found = rates(result)
    pairs = {name: rate for name, rate in found.items() if name.startswith("tandem") and "colocated" not in name}
    peers = {name: rate for name, rate in found.items() if name.startswith("vllm")}
    best, peer = max(pairs, key=pairs.__getitem__), max(peers, key=peers.__getitem__)
    beside = version_of(result, peer)
    return [
        Figure(f"output tokens/s, `{best}`", pairs[best], digits=0),
        Figure("output tokens/s, vLLM", peers[peer], digits=0, peer=beside),
        Figure("one prefill and one decode worker / vLLM", pairs[best] / peers[peer], goal=at_least(1.3), peer=beside),
    ]


def goodput_of(result: Result, workload: str, system: str) -> list[float] | None:
    """Return the medians over the seeds of a system's goodput, in requests/s, for the three pairs of limits."""
    entries = by_workload(result["entries"])[workload].get(system)
    return None if entries is None else [statistics.median(goodputs(entries, Slo(*pair, 1.0))) for pair in PAIRS]


def goodput(result: Result, kind: str) -> Sequence[Figure]:
    """Azure's conversations with `auto`, beside vLLM."""
    ours, theirs = (goodput_of(result, "azure-conversation", system) for system in ("tandem-auto", VLLM))
    if ours is None or theirs is None:
        return []
    return [
        Figure(
            f"Azure's conversations, {pair[0]} / {pair[1]} ms: `auto` / vLLM",
            one / other,
            goal=at_least(_GOODPUT_GOALS[pair]),
            peer="vLLM, 128 tokens a step",
        )
        for pair, one, other in zip(PAIRS, ours, theirs, strict=True)
    ]


def interference(result: Result, kind: str) -> Sequence[Figure]:
    """What long prompts do to streams, and how long they take themselves."""
    long_ttft = [median_of(result, system, "long_ttft_p50_ms") for system in ("tandem", VLLM)]
    beside = version_of(result, VLLM)
    return [
        Figure("p99 gap of 8 streams, with long prompts / without", median_of(result, "tandem", "ratio"), goal=at_most(1.3)),
        Figure("the same of vLLM", median_of(result, VLLM, "ratio"), peer=beside),
        Figure("TTFT of the long prompts / vLLM's", long_ttft[0] / long_ttft[1], goal=at_most(1.15), peer=beside),
    ]


def overhead(result: Result, kind: str) -> Sequence[Figure]:
    """Processor time outside the engine, and what it adds to a first token."""
    spent = statistics.median(each["us_per_token"] for each in result["cpu_per_token"])
    return [
        Figure("processor time outside the engine for a token", spent, "µs", 0, goal=at_most(120)),
        Figure("TTFT above the engine's", result["first_token"]["extra_ms"], "ms", 1, goal=at_most(5)),
    ]


def conditional(result: Result, kind: str) -> Sequence[Figure]:
    """The worst of all cells."""
    ratios = [
        cell["auto"][share] / min(cell["always"][share], cell["never"][share])
        for cell in result["cells"].values()
        for share in ("p50", "p99")
    ]
    return [Figure("TTFT of auto / the better of always and never, worst of 8", max(ratios), goal=at_most(1.1))]


def flood(result: Result, kind: str) -> Sequence[Figure]:
    """The other tenant's first tokens."""
    return [Figure("p95 TTFT of the other tenant, during the flood / alone", result["ratio"])]


def seats(result: Result, kind: str) -> Sequence[Figure]:
    """Short answers beside 150 long ones, over those beside 64."""
    ratios = [ratio for pool in ("all", "half") if pool in result for ratio in result[pool]["ratio"].values()]
    return [Figure("a short answer beside 150 long ones / beside 64, worst of pools and tenants", max(ratios))]


def memory(result: Result, kind: str) -> Sequence[Figure]:
    """Weights in four bits, a second worker's, and a whole cluster."""
    auto, second = result["weights"]["auto"]
    return [
        Figure("weights as stored in four bits / bfloat16", auto / result["weights"]["none"][0], goal=at_most(0.45)),
        Figure("memory that a second worker's weights add", 100 * second / auto, "%", 0, goal=at_most(10)),
        Figure("default cluster after 1,000 chats", sum(result["after_chats"].values()) / 2**30, "GiB", goal=at_most(2)),
    ]


def copies(result: Result, kind: str) -> Sequence[Figure]:
    """Throughput with copies of streams' KV over that without."""
    copying, plain = result["rounds"]
    ratio = median_of(result, copying, "output_tokens_per_s") / median_of(result, plain, "output_tokens_per_s")
    return [Figure("output tokens/s with copies / without", ratio)]


EXTRACT = {
    "throughput": throughput,
    "goodput": goodput,
    "interference": interference,
    "overhead": overhead,
    "conditional": conditional,
    "copies": copies,
    "flood": flood,
    "seats": seats,
    "memory": memory,
}
