"""Figures of the engine: its speed, and what formats of weights and KV bring and cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lib.rounds import interval
from benchmarks.pages.figure import Figure, Goal, at_least, at_most
from benchmarks.speculation import gains, predicted

Result = Mapping[str, Any]
DECODES = tuple(f"decode {size} x 256" for size in (1, 8, 16, 32, 64))
PREFILLS = ("prefill 256", "prefill 1024")
LONG_DECODES = ("decode 16 x 1024", "decode 1 x 4096")


def ratios(result: Result, peer: str, case: str) -> list[float]:
    """Return our tokens per second over the peer's for each number of threads; fewer where the peer was not measured."""
    found = {(each["system"], each["threads"]): each["medians"] for each in result["measured"]}
    threads = sorted({threads for _, threads in found})
    return [found["tandem", each][case] / found[peer, each][case] for each in threads if case in found.get((peer, each), {})]


def engine(result: Result, kind: str) -> Sequence[Figure]:
    """Beside vLLM and llama.cpp, each the lowest ratio of some cases and numbers of threads."""
    vllm, llama = f"vLLM {result['versions'].get('vllm', '')}", str(result["versions"].get("llama.cpp", ""))
    rows = [
        ("prefill of 256 and 1,024 tokens / vLLM's", "vllm", PREFILLS, 1.0, vllm),
        ("decode of 1 to 64 at 256 / vLLM's", "vllm", DECODES, 1.2, vllm),
        ("decode of 16 at 1,024 and 1 at 4,096 / vLLM's", "vllm", LONG_DECODES, 1.2, vllm),
    ]
    if kind == "avx2":
        rows += [
            ("AVX2: decode of one / llama.cpp's", "llama.cpp", DECODES[:1], 0.8, llama),
            ("AVX2: decode of 8 and 16 / llama.cpp's", "llama.cpp", DECODES[1:3], 1.1, llama),
        ]
    else:
        rows += [
            ("decode of 1 at 256 / llama.cpp's", "llama.cpp", DECODES[:1], 1.2, llama),
            ("prefill of 256 and 1,024 tokens / llama.cpp's", "llama.cpp", PREFILLS, 1.0 if kind == "amx" else 4.0, llama),
        ]
    figures = []
    for name, peer, cases, goal, version in rows:
        if found := [ratio for case in cases for ratio in ratios(result, peer, case)]:
            figures.append(Figure(f"{name}, lowest", min(found), digits=3, goal=at_least(goal), peer=version))
    if starts := [each["ready_s"] - each["imports_s"] for each in result["worker_start"]]:
        name = f"start of a worker, imports apart, median of {len(starts)}"
        figures.append(Figure(name, statistics.median(starts), "s", goal=at_most(1)))
    return figures


def step_gain(result: Result, step: str) -> tuple[float, float, float]:
    """Return how many times as fast a step is with KV in int8: ratio of the medians, and the 95 % interval of the rounds'."""
    plain, quantized = result["seconds"][step]["auto"], result["seconds"][step]["int8"]
    of_rounds = interval([one / other for one, other in zip(plain, quantized, strict=True)])
    return statistics.median(plain) / statistics.median(quantized), of_rounds["low"], of_rounds["high"]


def kv_formats(result: Result, kind: str) -> Sequence[Figure]:
    """Steps, and the bytes of a token."""
    sizes = result["token_bytes"]
    steps = (("16 at 1,024", "decode, 16 x 1,024"), ("1 at 7,900", "decode, 1 x 7,900"))
    figures = [
        Figure(f"decode of {text} with KV in int8, times as fast", step_gain(result, step)[0], goal=at_least(1.2))
        for text, step in steps
    ]
    ratio = sizes["int8"] / sizes["auto"]
    return [
        *figures,
        Figure("bytes of a token's KV, as a handoff carries it, int8 / bfloat16", ratio, digits=3, goal=at_most(0.52)),
    ]


def kv_quality(result: Result, kind: str) -> Sequence[Figure]:
    """How far int8 is from float32, and what is found."""
    needles = result["needles"].values()
    trials = sum(each["trials"] for each in needles)
    parts = result["distributions"]["bfloat16, KV in int8"].values()
    return [
        Figure("divergence from float32 with KV in int8, worst part", max(each["divergence"] for each in parts), "nats", 5),
        Figure(f"needles found with KV in int8, of {trials}", sum(each["int8"] for each in needles), digits=0),
        Figure(f"needles found with KV in bfloat16, of {trials}", sum(each["auto"] for each in needles), digits=0),
    ]


def speculation_gain(found: Mapping[str, Any], workload: str) -> tuple[float, float, float]:
    """Return how many times as fast tokens come with guesses: geometric mean over the rounds, and its 95 % interval."""
    of_rounds = gains(dict(found["rounds"]), workload)
    bounds = interval(of_rounds)
    return statistics.geometric_mean(of_rounds), bounds["low"], bounds["high"]


def speculation(result: Result, kind: str) -> Sequence[Figure]:
    """With one thread, and with two if these were measured. A draft model has no goals: where it pays is measured."""
    figures = []
    ngram = result["config"]["method"] == "ngram"

    def goal(least: float) -> Goal | None:
        return at_least(least) if ngram else None

    for threads, found in result["threads"].items():
        measured = {name.partition(": ")[0] for name in next(iter(found["rounds"].values()))[0]}
        of = f"{threads} thread{'s' if int(threads) > 1 else ''}"
        if "copy x 1" in measured:
            gain = speculation_gain(found, "copy x 1")[0]
            figures.append(Figure(f"1 stream that copies, times as fast, {of}", gain, goal=goal(1.8)))
        if "copy x 8" in measured:
            gain = speculation_gain(found, "copy x 8")[0]
            share = gain / predicted(dict(found), "copy x 8")
            figures.append(Figure(f"8 streams that copy, gain / predicted gain, {of}", share, goal=goal(0.85)))
        lowest = [speculation_gain(found, name)[1] for name in measured if name.startswith("random")]
        if lowest:
            figures.append(Figure(f"random text, times as fast, lowest end of 95 %, {of}", min(lowest), goal=goal(0.95)))
    return figures


def early_exit(result: Result, kind: str) -> Sequence[Figure]:
    """What drafts of the model's first layers would bring at best."""
    return [
        Figure(f"predicted gain of the best depth, {threads}", max(depths.values()), digits=2)
        for threads, depths in result["predicted_gain"].items()
    ]


def weight_formats(result: Result, kind: str) -> Sequence[Figure]:
    """Products of all layers with the weights of the default model, over those of oneDNN in bfloat16."""
    times = result["milliseconds"]
    return [
        Figure(f"products with {text} in four bits / oneDNN's in bfloat16, time", times[rows]["int4"] / times[rows]["oneDNN"])
        for text, rows in (("one row", "1"), ("16 rows", "16"), ("256 rows", "256"))
    ]


def quality(result: Result, kind: str) -> Sequence[Figure]:
    """The model as it is stored, and rounded to eight bits."""
    figures = result["figures"]
    return [
        Figure(f"divergence from float32, {name}", figures[key]["divergence"], "nats", 5)
        for name, key in (("four bits as stored", "four bits as stored, 8 rows a step"), ("int8", "int8, 8 rows a step"))
    ]


def tensor_parallel(result: Result, kind: str) -> Sequence[Figure]:
    """Two ranks beside one."""
    one, two = result["steps_ms"]["1 rank"], result["steps_ms"]["2 ranks"]
    return [
        Figure(f"a step on two ranks / on one, {case}", two[case] / one[case])
        for case in ("prefill of 256", "decode, 16 at 256")
    ]


EXTRACT = {
    "engine": engine,
    "kv_formats": kv_formats,
    "kv_quality": kv_quality,
    "speculation": speculation,
    "speculation_draft_model": speculation,
    "early_exit": early_exit,
    "weight_formats": weight_formats,
    "quality": quality,
    "tensor_parallel": tensor_parallel,
}
