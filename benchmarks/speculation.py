"""What guessed tokens bring: `python -m benchmarks.speculation --peer-env DIR`, on an idle machine.

Prompts whose answers copy (`tandem bench --dataset-name copy`), greedy, one and eight at a time; random prompts with sampled
answers, in which nothing repeats, 1, 8 and 64 at a time. 1 prefill and 1 decode worker, whose threads are one or two. Clusters
with and without `--speculative-config` take turns, each fresh in every round, and the first one changes from round to round.
What counts is the mean time per output token. Every prompt is sent for one token before, so that it is cached, and as many
streams run together as are asked for.

`--method draft_model` measures a draft model instead: clusters serve with `--quantization none`, and the four bits that the
same file stores draft. Peers are left out then.

Peers answer the copying prompts, with their own n-gram speculation and without, in rounds of their own.

The predicted gain: tokens per step with drafts over those without, times what a step without drafts takes over what one with as
many rows takes, and the draft model's steps where there is one. Rows are timed in a process of their own, by the engine that
workers have.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import ROOT, operators, write_result
from benchmarks.lib.journal import Journal, add_state, journal_of
from benchmarks.lib.load import CopyPrompts, RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.rounds import LEAST_PAIRS, Round, compare, interval, round_ratios
from benchmarks.lib.row_times import CONTEXT, DRAFTS, STREAMS, row_name
from benchmarks.lib.servers import TANDEM, System, serving
from benchmarks.lib.servers import system as known_system
from benchmarks.peers.setup import PeerEnv
from loadtest.options import BenchOptions

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
CONFIGS = {"ngram": CONFIG, "draft_model": {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}}
QUANTIZATION = {"ngram": "auto", "draft_model": "none"}
"""Of the served model, by method."""
ROUNDS = {"ngram": 10, "draft_model": 4}
"""Ten where the default is decided."""
THREADS = (1, 2)
ANSWER = 128
WORKLOADS: dict[str, tuple[Callable[[int], CopyPrompts | RandomPrompts], float, int, int]] = {
    "copy x 1": (CopyPrompts, 0.0, 1, 9),
    "copy x 8": (CopyPrompts, 0.0, 8, 24),
    "random x 1": (partial(RandomPrompts, 200), 1.0, 1, 6),
    "random x 8": (partial(RandomPrompts, 200), 1.0, 8, 24),
    "random x 64": (partial(RandomPrompts, 200), 1.0, 64, 128),
}
"""Prompts by the length of answers, temperature, requests at a time, requests in all."""
COPIES = tuple(name for name in WORKLOADS if name.startswith("copy"))
_COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "engine_steps", "engine_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ngram", choices=list(CONFIGS))
    parser.add_argument("--rounds", type=int, help="ten with ngram, four with a draft model")
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--peer-env", type=Path, help="the folder made by benchmarks.peers.setup")
    parser.add_argument("--port", type=int, default=8199)
    add_state(parser)
    options = parser.parse_args()
    options.rounds = options.rounds or ROUNDS[options.method]
    journal = journal_of(parser, options)
    result = measured(options, journal)
    name = "speculation" if options.method == "ngram" else f"speculation_{options.method}"
    write_result(f"{name}_{operators()}", result, table(result))


def measured(options: argparse.Namespace, journal: Journal) -> dict[str, Any]:
    """All turns: rows, ours by threads, and peers."""
    method = options.method
    found: dict[str, Any] = {
        "config": CONFIGS[method],
        "quantization": QUANTIZATION[method],
        "answer_tokens": ANSWER,
        "threads": {},
    }
    for threads in options.threads:
        rows = journal.once(f"rows, {threads} threads", partial(row_times, threads, QUANTIZATION[method]))
        draft = None
        if method == "draft_model":
            draft = journal.once(f"draft rows, {threads} threads", partial(row_times, threads, "auto"))
        with ours(threads, method=method) as systems:
            compared = compare(
                systems, options.rounds, journal, lambda system, seed: one_turn(system, options.port, options.workloads, seed)
            )
        found["threads"][str(threads)] = {"rows_ms": rows, "draft_rows_ms": draft, **compared}
    if options.peer_env is not None and options.peer_rounds and method == "ngram":
        with ours(max(options.threads), "tandem") as systems:
            compared = compare(
                [*systems, *peers(PeerEnv(options.peer_env.resolve()))],
                options.peer_rounds,
                journal,
                lambda system, seed: one_turn(system, options.port, [w for w in COPIES if w in options.workloads], 100 + seed),
            )
        found["peers"] = compared
    return found


def row_times(threads: int, quantization: str) -> dict[str, float]:
    """Milliseconds of steps, in a process of its own that has so many threads."""
    command = [sys.executable, "-m", "benchmarks.lib.row_times", str(threads), quantization]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows: dict[str, float] = json.loads(done.stdout)
    return rows


@contextmanager
def ours(threads: int, name: str = "", method: str = "ngram") -> Iterator[list[System]]:
    """Clusters with and without guesses, whose decode worker has so many threads; called after these, or by `name`."""
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for kind, config in (("plain", None), (method, CONFIGS[method])):
            file = Path(folder) / f"{kind}.yaml"
            more: dict[str, Any] = {"quantization": QUANTIZATION[method], "speculative_config": config}
            file.write_text(json.dumps({"decode": {"threads": threads}, "prefill": {"threads": 1}, **more}))
            command = [TANDEM, "serve", "--disaggregation", "always", "--config", str(file)]
            settings = "1 prefill, 1 decode worker" + (", guesses" if config else "")
            made.append(System(f"{name or f'{threads} threads'}, {kind}", settings, command, {"PYTHONPATH": str(ROOT)}))
        yield made


def peers(env: PeerEnv) -> list[System]:
    """vLLM and llama.cpp, each with its n-gram speculation and without."""
    vllm, llama = known_system("vllm", env), known_system("llama.cpp", env)
    ngram = ["--speculative-config", json.dumps(CONFIG)]
    simple = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4"]
    simple += ["--spec-draft-n-max", "4"]
    return [
        vllm,
        replace(vllm, name="vllm ngram", settings=f"{vllm.settings}, ngram", command=[*vllm.command, *ngram]),
        llama,
        replace(llama, name="llama.cpp ngram", settings=f"{llama.settings}, ngram-simple", command=[*llama.command, *simple]),
    ]


async def one_turn(system: System, port: int, workloads: list[str], seed: int) -> Round:
    """Milliseconds per output token of each workload on a fresh server, and what its decode worker counted."""
    found: Round = {}
    with serving(system, port) as url:
        await warm_up(url)
        for name in workloads:
            before: dict[str, float] = {}
            for answer in (1, ANSWER):
                before = counted(url)
                done = await put_load(load_of(url, name, answer, seed))
                if failed := done.figures["failed"]:
                    raise RuntimeError(f"{failed} requests failed")
            found[f"{name}: tpot_ms"] = done.figures["mean_tpot_ms"]
            after = counted(url)
            found |= {f"{name}: {counter}": after[counter] - before[counter] for counter in after}
    return found


def load_of(url: str, workload: str, answer: int, seed: int) -> BenchOptions:
    """The workload with answers of this length."""
    prompts, temperature, at_once, requests = WORKLOADS[workload]
    return bench_options(
        url, prompts(answer), num_prompts=requests, seed=seed, max_concurrency=at_once, temperature=temperature
    )


def counted(url: str) -> dict[str, float]:
    """What decode workers have counted since the start; nothing from other servers than ours."""
    found = dict.fromkeys(_COUNTERS, 0.0)
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    if not any(line.startswith("tandem:") for line in lines):
        return {}
    for line in lines:
        name = line.partition("{")[0].removeprefix("tandem:").removesuffix("_total")
        if name in found and 'role="decode"' in line:
            found[name] += float(line.rpartition(" ")[2])
    return found


def gains(rounds: dict[str, list[Round]], workload: str) -> list[float]:
    """How many times as fast tokens came with guesses, by round."""
    plain, ngram = rounds.values()
    return round_ratios(plain, ngram, f"{workload}: tpot_ms")


def predicted(found: dict[str, Any], workload: str) -> float:
    """The gain that row costs and acceptance allow: see above."""
    plain, ngram = found["rounds"].values()
    at_once = WORKLOADS[workload][2]
    tokens = [sum(each[f"{workload}: engine_tokens"] for each in rounds) for rounds in (plain, ngram)]
    steps = [sum(each[f"{workload}: engine_steps"] for each in rounds) for rounds in (plain, ngram)]
    drafts = sum(each[f"{workload}: spec_decode_num_draft_tokens"] for each in ngram) / steps[1] / at_once
    more_tokens: float = (tokens[1] / steps[1]) / (tokens[0] / steps[0])
    draft_rows = found.get("draft_rows_ms")
    draft_ms = 0.0 if draft_rows is None else drafts * draft_rows[row_name(at_once, 0)]
    return more_tokens * step_ms(found, at_once, 0) / (step_ms(found, at_once, drafts) + draft_ms)


def step_ms(found: dict[str, Any], streams: int, drafts: float) -> float:
    """What a step takes with so many drafts of each stream, on a line between what was timed."""
    low = min(int(drafts), DRAFTS[-2])
    below, above = (found["rows_ms"][row_name(streams, number)] for number in (low, low + 1))
    return float(below + (drafts - low) * (above - below))


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Guessed tokens",
        "",
        f"{json.dumps(result['config'])}, quantization {result.get('quantization', 'auto')}; answers of "
        f"{result['answer_tokens']} tokens; milliseconds per output token, means over the rounds, and how many times as fast "
        "with guesses. In brackets the 95 % interval over the rounds.",
        "",
        "| threads | workload | without | with | times as fast | predicted | drafts, accepted | tokens a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for threads, found in result["threads"].items():
        plain, ngram = found["rounds"].values()
        for name in [name for name in WORKLOADS if f"{name}: tpot_ms" in plain[0]]:
            means = [statistics.mean(each[f"{name}: tpot_ms"] for each in rounds) for rounds in (plain, ngram)]
            ratios = gains(found["rounds"], name)
            bounds = interval(ratios) if len(ratios) >= LEAST_PAIRS else {"low": math.nan, "high": math.nan}
            drafts, accepted, steps, tokens = (sum(each[f"{name}: {counter}"] for each in ngram) for counter in _COUNTERS)
            expected = f"{predicted(found, name):.2f}" if WORKLOADS[name][2] in STREAMS else ""
            lines.append(
                f"| {threads} | {name} | {means[0]:.2f} ms | {means[1]:.2f} ms | {statistics.geometric_mean(ratios):.2f} "
                f"({bounds['low']:.2f} to {bounds['high']:.2f}) | {expected} | {drafts:.0f}, {accepted:.0f} "
                f"| {tokens / steps:.2f} |"
            )
    lines += [
        "",
        f"A step by its rows, milliseconds, contexts of {CONTEXT} tokens:",
        "",
        f"| threads | streams | {' | '.join(f'{number} drafts each' for number in DRAFTS)} |",
        f"|---|---|{'---|' * len(DRAFTS)}",
    ]
    for threads, found in result["threads"].items():
        for streams in STREAMS:
            cells = " | ".join(f"{found['rows_ms'][row_name(streams, number)]:.1f}" for number in DRAFTS)
            lines.append(f"| {threads} | {streams} | {cells} |")
    options = "--peer-env DIR" if result["config"]["method"] == "ngram" else f"--method {result['config']['method']}"
    return "\n".join([*lines, *_peer_lines(result), "", f"Command: `python -m benchmarks.speculation {options}`"])


def _peer_lines(result: dict[str, Any]) -> list[str]:
    if "peers" not in result:
        return []
    rounds: dict[str, list[Round]] = result["peers"]["rounds"]
    names = [name for name in COPIES if f"{name}: tpot_ms" in next(iter(rounds.values()))[0]]
    lines = ["", "Beside others, all cores, in rounds of their own; medians:", ""]
    lines += [f"| | {' | '.join(names)} | |", f"|---|{'---|' * len(names)}---|"]
    for name, found in rounds.items():
        cells = " | ".join(f"{statistics.median(each[f'{w}: tpot_ms'] for each in found):.2f} ms" for w in names)
        lines.append(f"| {name} | {cells} | {result['peers']['settings'][name]} |")
    return lines


if __name__ == "__main__":
    main()
