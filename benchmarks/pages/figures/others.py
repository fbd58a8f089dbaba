"""Figures of checks by others' programs, of the simulator, of grammars, and of GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages.figure import Figure, at_least, at_most

Result = Mapping[str, Any]


def structured(result: Result, kind: str) -> Sequence[Figure]:
    """Valid answers, and what a grammar costs a step."""
    outcomes = result["outcomes"].values()
    valid = sum(each.get("valid", 0) for each in outcomes)
    pairs = zip(result["cost"]["constrained"], result["cost"]["free"], strict=True)
    cost = statistics.median(constrained / free for constrained, free in pairs)
    return [
        Figure("answers that follow their schema", 100 * valid / sum(sum(each.values()) for each in outcomes), "%", 1),
        Figure("a step of 16 with schemas / without", cost),
    ]


def simulate(result: Result, kind: str) -> Sequence[Figure]:
    """The goodput that is farthest from the measured one."""
    worst = max(abs(row["ratio"] - 1) for row in result["rows"])
    return [Figure(f"farthest from the measured goodput, of {len(result['rows'])}", 100 * worst, "%", 0, goal=at_most(10))]


def paced_simulation(result: Result, kind: str) -> Sequence[Figure]:
    """For each cluster, the load whose median TTFT is farthest from the simulated one."""
    off: dict[str, float] = {}
    for row in result["rows"]:
        share = abs(row["simulated"]["ttft_p50"] / row["measured"]["ttft_p50"] - 1)
        off[row["shape"]] = max(off.get(row["shape"], 0.0), 100 * share)
    return [
        Figure(f"median TTFT of {shape}, simulated and measured: they differ by", worst, "%", 0, goal=at_most(10))
        for shape, worst in off.items()
    ]


def guidellm(result: Result, kind: str) -> Sequence[Figure]:
    """Requests that failed, and the pace."""
    return [
        Figure(
            "failed requests", sum(row["failed"] for row in result["rows"]), digits=0, peer=result["client"], goal=at_most(0)
        ),
        *(
            Figure(f"output tokens/s, {row['streams']} at a time", row["answer_tokens_per_s"], digits=0, peer=result["client"])
            for row in result["rows"]
        ),
    ]


def agreement(result: Result, kind: str) -> Sequence[Figure]:
    """The largest differences between the two clients."""
    return [
        Figure(
            f"{name}: largest difference",
            max(100 * abs(row["ours"][key] / row["theirs"][key] - 1) for row in result["rows"]),
            "%",
            1,
            peer=result["client"],
        )
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "itl_ms"))
    ]


def lm_eval(result: Result, kind: str) -> Sequence[Figure]:
    """Against transformers."""
    difference = result["largest_difference"]
    return [
        Figure(f"largest difference of {result['loglikelihoods']} loglikelihoods", difference, "nats", 5, peer="transformers")
    ]


def api_cases(result: Result, kind: str) -> Sequence[Figure]:
    """Whether all answers are as documented."""
    return [
        Figure("cases", result["cases"], digits=0, peer="schemathesis"),
        Figure("all are answered as documented (1: yes)", float(result["as_documented"]), digits=0, goal=at_least(1)),
    ]


def fresh_clone(result: Result, kind: str) -> Sequence[Figure]:
    """With empty caches."""
    return [
        Figure("`make serve` is ready after", result["ready_s"], "s", 0),
        Figure("the first answer takes", result["first_answer_s"], "s"),
        Figure("`make test` takes", result["test_s"] / 60, "min", 1, goal=at_most(12)),
        Figure("`make docs` takes", result["docs_s"], "s", 0),
    ]


def kernel_resources(result: Result, kind: str) -> Sequence[Figure]:
    """Kernels that spill registers."""
    kernels = result["kernels"]
    return [
        Figure("kernels compiled, by compute capability", len(kernels), digits=0),
        Figure("kernels that keep values in local memory", sum(each["local_bytes"] > 0 for each in kernels), digits=0),
    ]


def host_step(result: Result, kind: str) -> Sequence[Figure]:
    """What the host takes for decode steps on a GPU."""
    return [
        Figure(
            f"host's part of a decode step of {step['rows']} rows",
            step["step_ms"],
            "ms",
            goal=at_most(1.5) if step["rows"] == 128 else None,
        )
        for step in result["steps"]
    ]


def certify(result: Result, kind: str) -> Sequence[Figure]:
    """Parts that passed, and what the kernels reach, if these parts were run."""
    parts = result["parts"]
    tables = {name: rows for part in parts for name, rows in part["tables"].items()}
    figures = [Figure("parts passed", sum(part["status"] == "passed" for part in parts), f"of {len(parts)}", 0)]
    kernels = tables.get("Times of one layer of an 8B model, in bfloat16", [])
    steps = tables.get("Steps", [])
    figures += [
        Figure("decode attention of 64 at 4,096, of a copy's rate", _percent(row["of the copy"]), "%", 0, goal=at_least(85))
        for row in kernels
        if row["kernel"] == "decode attention, 64 at 4,096"
    ]
    if prefills := [_percent(row["floor of the time"]) for row in steps if row["step"].startswith("prefill")]:
        figures.append(Figure("prefill, of the rate of products, lowest", min(prefills), "%", 0, goal=at_least(60)))
    figures += [
        Figure("decode step of 16 at 4,096 / its byte floor", row["ms"] / row["byte floor, ms"], goal=at_most(1.2))
        for row in steps
        if row["step"] == "decode 16 at 4,096"
    ]
    pushes = tables.get("A push of 8,192 tokens of an 8B model, both sides' fingerprints included", [])
    if rates := [_percent(row["of a copy within the device"]) for row in pushes]:
        figures.append(Figure("handoff, of a copy's rate, best transport", max(rates), "%", 0, goal=at_least(70)))
    return figures


def _percent(text: str) -> float:
    return float(text.removesuffix("%"))


def against(result: Result, kind: str) -> Sequence[Figure]:
    """Ratios to the other commit."""
    rows = result["ratios"]
    return [
        Figure(f"{name} / that of {result['other'][:7]}", rows[name]["median"])
        for name in ("prefill 256", "decode 16 x 256", "output_tokens_per_s")
    ]


EXTRACT = {
    "structured": structured,
    "simulate": simulate,
    "paced_simulation": paced_simulation,
    "guidellm": guidellm,
    "agreement": agreement,
    "lm_eval": lm_eval,
    "api_cases": api_cases,
    "fresh_clone": fresh_clone,
    "kernel_resources": kernel_resources,
    "host_step": host_step,
    "certify": certify,
    "against": against,
}
