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
        Figure("all answered as documented (1: yes)", float(result["as_documented"]), digits=0, goal=at_least(1)),
    ]


def kernel_resources(result: Result, kind: str) -> Sequence[Figure]:
    """Kernels that spill registers."""
    kernels = result["kernels"]
    return [
        Figure("kernels compiled, by compute capability", len(kernels), digits=0),
        Figure("of these with values in local memory", sum(each["local_bytes"] > 0 for each in kernels), digits=0),
    ]


def certify(result: Result, kind: str) -> Sequence[Figure]:
    """Parts that passed."""
    parts = result["parts"]
    return [Figure("parts passed", sum(part["status"] == "passed" for part in parts), f"of {len(parts)}", 0)]


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
    "guidellm": guidellm,
    "agreement": agreement,
    "lm_eval": lm_eval,
    "api_cases": api_cases,
    "kernel_resources": kernel_resources,
    "certify": certify,
    "against": against,
}
