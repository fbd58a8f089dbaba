"""Figures of servers under load, beside others and alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.goodput_report import by_workload, goodputs
from benchmarks.lib.slo import LOWEST_STEP, PAIRS, Slo, rate_of
from benchmarks.pages.figure import Figure, at_least, at_most

Result = Mapping[str, Any]
VLLM = "vllm:128"
GOODPUT_SYSTEMS = ("tandem", "tandem-auto", VLLM)
"""Those whose goodput pages show."""
LOWEST_RATE = rate_of(LOWEST_STEP)
"""In requests/s, of those that goodput tries: what is not good there is under it."""
_GOODPUT_GOALS = {(500, 30): 2.0, (500, 40): 1.5, (1000, 60): 1.3}


def median_of(result: Result, system: str, figure: str) -> float:
    """Return the median of a figure over a system's rounds."""
    return float(statistics.median(each[figure] for each in result["rounds"][system]))


def rates(result: Result) -> dict[str, float]:
    """Return the output tokens per second of each system."""
    return {system: median_of(result, system, "output_tokens_per_s") for system in result["rounds"]}


def version_of(result: Result, system: str) -> str:
    """Return what the settings of a peer say of its version, or its name."""
    return str(result.get("settings", {}).get(system, "vLLM")).split(",")[0]


def best(result: Result) -> tuple[str, str]:
    """Return the names of the fastest pair of a prefill and a decode worker, and of the fastest vLLM."""
    found = rates(result)
    pairs = [name for name in found if name.startswith("tandem") and "colocated" not in name]
    return max(pairs, key=found.__getitem__), max((name for name in found if name.startswith("vllm")), key=found.__getitem__)


def throughput(result: Result, kind: str) -> Sequence[Figure]:
    """Output tokens per second of one prefill and one decode worker, and beside the best of vLLM."""
    found = rates(result)
    ours, peer = best(result)
    beside = version_of(result, peer)
    return [
        Figure(f"output tokens/s, `{ours}`", found[ours], digits=0),
        Figure("output tokens/s, vLLM", found[peer], digits=0, peer=beside),
        Figure("one prefill and one decode worker / vLLM", found[ours] / found[peer], goal=at_least(1.3), peer=beside),
    ]


def one_arithmetic(result: Result, kind: str) -> Sequence[Figure]:
    """Tokens per second with one arithmetic, and beside oneDNN's products."""
    found = rates(result)
    ratio = found["one arithmetic"] / found["oneDNN"]
    return [
        Figure("output tokens/s with one arithmetic", found["one arithmetic"], digits=0),
        Figure("tokens/s, one arithmetic / oneDNN's products", ratio, goal=at_least(0.95)),
    ]


def shown_entries(result: Result) -> list[dict[str, Any]]:
    """Return what pages show of a result that is merged from several runs; nothing of another one."""
    return [entry for entry in result.get("entries", ()) if entry["system"] in GOODPUT_SYSTEMS]


def goodput_of(result: Result, workload: str, system: str, beside: Sequence[str] = GOODPUT_SYSTEMS) -> list[float]:
    """Return the medians over the seeds of a system's goodput, in requests/s, for the three pairs of limits.

    Only seeds count in which it and those `beside` it were measured on one processor at one commit. Without any the list is
    empty.
    """
    systems = by_workload(shown_entries(result)).get(workload, {})
    of_seed: dict[int, list[Any]] = {}
    for entry in (entry for name in beside for entry in systems.get(name, ())):
        of_seed.setdefault(entry["seed"], []).append((entry["environment"]["processor"], entry["environment"]["commit"]))
    together = {seed for seed, where in of_seed.items() if len(where) == len(beside) and len(set(where)) == 1}
    entries = [entry for entry in systems.get(system, ()) if entry["seed"] in together]
    return [statistics.median(goodputs(entries, Slo(*pair, 1.0))) for pair in PAIRS] if entries else []


def goodput(result: Result, kind: str) -> Sequence[Figure]:
    """Azure's conversations with `auto`, beside vLLM. One without a good rate counts as one that is good at the lowest."""
    both = ("tandem-auto", VLLM)
    ours, theirs = (goodput_of(result, "azure-conversation", system, both) for system in both)
    return [
        Figure(
            f"Azure's conversations, {pair[0]} / {pair[1]} ms: `auto` / vLLM",
            one / max(other, LOWEST_RATE),
            goal=at_least(_GOODPUT_GOALS[pair]),
            peer="vLLM, 128 tokens a step",
        )
        for pair, one, other in zip(PAIRS if ours and theirs else (), ours, theirs, strict=True)
    ]


def interference(result: Result, kind: str) -> Sequence[Figure]:
    """What long prompts do to streams, and how long they take themselves."""
    long_ttft = [median_of(result, system, "long_ttft_p50_ms") for system in ("tandem", VLLM)]
    beside = version_of(result, VLLM)
    return [
        Figure("p99 gap of 8 streams, with long prompts / without", median_of(result, "tandem", "ratio"), goal=at_most(1.3)),
        Figure("p99 gap of 8 streams of vLLM, with long prompts / without", median_of(result, VLLM, "ratio"), peer=beside),
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
    return [
        Figure(
            f"a short answer {whose} beside 150 long ones / beside 64, worse of two pools",
            max(result[pool]["ratio"][tenant] for pool in ("all", "half") if pool in result),
            goal=at_most(bound),
        )
        for tenant, whose, bound in (("other", "of another tenant", 3), ("same", "of the same tenant", 6))
    ]


def memory(result: Result, kind: str) -> Sequence[Figure]:
    """Weights in four bits, a second worker's, and a whole cluster."""
    auto, second = result["weights"]["auto"]
    return [
        Figure("weights as stored in four bits / bfloat16", auto / result["weights"]["none"][0], goal=at_most(0.45)),
        Figure(
            "memory that a second worker's weights add (below 0: noise)",
            100 * second / auto,
            "%",
            0,
            goal=at_most(10),
        ),
        Figure("default cluster after 1,000 chats", sum(result["after_chats"].values()) / 2**30, "GiB", goal=at_most(2)),
    ]


def copies(result: Result, kind: str) -> Sequence[Figure]:
    """Throughput with copies of streams' KV over that without."""
    copying, plain = result["rounds"]
    ratio = median_of(result, copying, "output_tokens_per_s") / median_of(result, plain, "output_tokens_per_s")
    return [Figure("output tokens/s with copies / without", ratio)]


EXTRACT = {
    "throughput": throughput,
    "one_arithmetic": one_arithmetic,
    "goodput": goodput,
    "interference": interference,
    "overhead": overhead,
    "conditional": conditional,
    "copies": copies,
    "flood": flood,
    "seats": seats,
    "memory": memory,
}
