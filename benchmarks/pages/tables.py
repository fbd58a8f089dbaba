"""The tables of README and docs that are made of results: a function for each, by the name in the page's markers.

A table's lines are made for a page in some folder, so that links lead to the results from there. Where a table has no column
for commits, a line under it names them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.row_times import STREAMS
from benchmarks.lib.slo import PAIRS
from benchmarks.pages.figures import engines, servers
from benchmarks.pages.markers import FOOTNOTE, MARK
from benchmarks.pages.results import Result
from benchmarks.speculation import COPIES, WORKLOADS, predicted
from benchmarks.suite.exercised import exercised
from benchmarks.suite.history import Age, History


@dataclass(frozen=True)
class Source:
    """What a table is made of: the results by name, and how their files are reached from the page."""

    results: Mapping[str, Result]
    history: History
    folder: str
    """The way from the page to the folder of the results, with a slash behind it."""

    def data(self, name: str) -> Mapping[str, Any]:
        """Return the JSON of a result."""
        return self.results[name].data

    def link(self, name: str, text: str = "") -> str:
        """Return a link to a result's page."""
        return f"[{text or name}]({self.folder}{name}.md)"

    def commit(self, name: str, commits: Sequence[str] = (), is_footnote: bool = False) -> str:
        """Return a link that says a result's commits, or those of it that matter, with the mark of their age behind it.

        With `is_footnote` the mark of an older one is short.
        """
        result = self.results[name]
        shown = commits or result.commits
        named = ", ".join(commit[:7] + ("+changes" if "+" in commit else "") for commit in shown)
        age = self.history.age(shown, exercised(result.part))
        mark = FOOTNOTE if is_footnote and age is Age.OLDER else f", {MARK[age]}" if MARK[age] else ""
        return f"{self.link(name, named)}{mark}"

    def origin(self, *names: str, commits: Sequence[str] = ()) -> list[str]:
        """Return the lines under a table that say where its figures are from."""
        links = "; ".join(self.commit(name, commits) for name in names)
        return ["", f"{'Commit' if len(names) + len(commits) == 1 else 'Commits'} {links}"]


def figures(source: Source) -> list[str]:
    """README's: where Tandem is ahead of vLLM, and where it loses."""
    amd = "_avx512_bf16"
    goodput, gaps = source.data(f"goodput{amd}"), source.data(f"interference{amd}")
    p99 = [servers.median_of(gaps, name, "itl_p99_ms") for name in ("tandem", servers.VLLM)]
    conversations, code = (
        [_rate(servers.goodput_of(goodput, workload, name)) for name in ("tandem-auto", servers.VLLM)]
        for workload in ("azure-conversation", "azure-code")
    )

    def row(text: str, cells: Sequence[str], name: str, commits: Sequence[str] = ()) -> str:
        hardware = source.results[name].machine
        return f"| {text} | {hardware} | {' | '.join(cells)} | {source.commit(name, commits, is_footnote=True)} |"

    def of_goodput(text: str, cells: Sequence[str], workload: str) -> str:
        return row(f"goodput¹, Azure's {text}", cells, f"goodput{amd}", _commits(goodput, workload))

    return [
        "| what | hardware | Tandem | vLLM | commit |",
        "|---|---|---|---|---|",
        row(LOAD, _throughput(source, f"throughput{amd}"), f"throughput{amd}"),
        of_goodput("conversations, `tandem-auto`", conversations, "azure-conversation"),
        row("p99 gap of 8 streams as long prompts² arrive, `tandem`", [f"{each:.0f} ms" for each in p99], f"interference{amd}"),
        of_goodput("code: long prompts, short answers, `tandem-auto`", code, "azure-code"),
        row(f"{LOAD}, with AMX", _throughput(source, "throughput_amx"), "throughput_amx"),
    ]


LOAD = "16 streams, 256 tokens in, 128 out"


def _throughput(source: Source, name: str) -> list[str]:
    """The fastest of ours, and of vLLM's."""
    rates = servers.rates(source.data(name))
    return [f"{rates[system]:.0f} tokens/s, `{system}`" for system in servers.best(source.data(name))]


def _commits(goodput: Mapping[str, Any], *workloads: str) -> list[str]:
    """The commits at which these workloads were measured for the systems that tables show."""
    shown = servers.shown_entries(goodput)
    return sorted({entry["environment"]["commit"] for entry in shown if entry["workload"] in workloads})


def _rate(medians: Sequence[float]) -> str:
    """Goodput within the first pair of limits."""
    return f"{_shown(medians[0])} req/s" if medians else "not in one run"


def _shown(rate: float) -> str:
    return f"{rate:.2g}" if rate and rate < 1 else f"{rate:.1f}" if rate else f"under {servers.LOWEST_RATE:g}"


GOODPUT_ROWS = {
    "azure-conversation": "Azure's conversations, divided by 8",
    "azure-code": "Azure's code, divided by 8: longer prompts, short answers",
    "mooncake-conversation": "Mooncake's conversations, divided by 32: very long prompts",
    "200-in-200-out": "200 tokens in, 200 out",
}


def goodput(source: Source) -> list[str]:
    """Goodput of all workloads."""
    name = "goodput_avx512_bf16"
    data = source.data(name)
    limits = ", ".join(f"{ttft:,} / {tpot}" for ttft, tpot in PAIRS)
    lines = [f"| within {limits} ms | Tandem | Tandem, `auto` | vLLM | seeds |", "|---|---|---|---|---|"]
    for workload, text in GOODPUT_ROWS.items():
        seeds = {entry["seed"] for entry in data["entries"] if (entry["workload"], entry["system"]) == (workload, "tandem")}
        cells = [
            ", ".join(_shown(rate) for rate in servers.goodput_of(data, workload, system)) or "not in one run"
            for system in servers.GOODPUT_SYSTEMS
        ]
        lines.append(f"| {text} | {' | '.join(cells)} | {len(seeds)} |")
    return [*lines, *source.origin(name, commits=_commits(data, *GOODPUT_ROWS))]


ENGINE_ROWS = {
    "prefill 256": "prefill of 256 tokens",
    "prefill 1024": "prefill of 1,024 tokens",
    "decode 1 x 256": "decode, one sequence at 256 tokens",
    "decode 16 x 256": "decode, 16 at 256",
    "decode 32 x 256": "decode, 32 at 256",
    "decode 16 x 1024": "decode, 16 at 1,024",
}


def engine(source: Source) -> list[str]:
    """The engine beside vLLM's and llama.cpp."""
    names = ("engine_amx", "engine_avx512", "engine_avx512_bf16")
    lines = [
        "| | Intel Xeon, AMX: vLLM 0.32 (bfloat16), 1 / 2 threads | llama.cpp (Q4_1), 1 / 2 "
        "| the same, AMX hidden: vLLM, 1 / 2 | llama.cpp, 1 / 2 | AMD EPYC, AVX-512: vLLM, 1 / 2 | llama.cpp, 1 / 2 |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, text in ENGINE_ROWS.items():
        cells = [
            " / ".join(f"{ratio:.2f}" for ratio in engines.ratios(source.data(name), peer, case))
            for name in names
            for peer in ("vllm", "llama.cpp")
        ]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return [*lines, *source.origin(*names)]


QUALITY_ROWS = {
    "float32": "float32",
    "bfloat16, 512 rows a step": "bfloat16",
    "four bits as stored, 8 rows a step": "four bits as stored, 1 or 8 rows a step",
    "int8, 8 rows a step": "int8, rounded when loaded",
    "int4, 8 rows a step": "int4, rounded when loaded",
}


def quality(source: Source) -> list[str]:
    """Formats of weights, by what they say."""
    lines = [
        "| | perplexity | divergence (nats) | mean distance of a token's logprob | same best token |",
        "|---|---|---|---|---|",
    ]
    for key, text in QUALITY_ROWS.items():
        found = source.data("quality")["figures"][key]
        cells = [
            f"{found['divergence']:.5f}",
            f"{found['mean_logprob_distance']:.4f}",
            f"{100 * found['same_best_token']:.1f} %",
        ]
        lines.append(f"| {text} | {found['perplexity']:.3f} | {' | '.join(cells if key != 'float32' else ['', '', ''])} |")
    return [*lines, *source.origin("quality")]


KV_STEPS = {
    "decode, 16 x 1,024": "decode, 16 streams of 1,024 tokens",
    "decode, 1 x 7,900": "decode, one stream of 7,900 tokens",
    "decode, 16 x 256": "decode, 16 streams of 256 tokens",
    "decode, 1 x 256": "decode, one stream of 256 tokens",
    "prefill, 512 after 0": "prefill, 512 tokens at the beginning",
    "prefill, 512 after 3,584": "prefill, 512 tokens after 3,584",
}


def kv_formats(source: Source) -> list[str]:
    """Steps with KV in int8."""
    lines = ["| step | int8 is so many times as fast as bfloat16 | 95 % interval |", "|---|---|---|"]
    for step, text in KV_STEPS.items():
        ratio, low, high = engines.step_gain(source.data("kv_formats_avx512_bf16"), step)
        lines.append(f"| {text} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
    return [*lines, *source.origin("kv_formats_avx512_bf16")]


def kv_quality(source: Source) -> list[str]:
    """What KV in int8 costs in quality."""
    lines = ["| computed in | positions | perplexity | divergence (nats) | same best token |", "|---|---|---|---|---|"]
    found = source.data("kv_quality")["distributions"]
    plain, quantized = "bfloat16", "bfloat16, KV in int8"
    for positions in found[plain]:
        for name in (plain, quantized):
            row = found[name][positions]
            best = f"{100 * row['same_best_token']:.1f} %"
            lines.append(f"| {name} | {positions} | {row['perplexity']:.2f} | {row['divergence']:.5f} | {best} |")
    return [*lines, *source.origin("kv_quality")]


SPECULATION_ROWS = {
    "copy x 1": "1 that copies",
    "copy x 8": "8 that copy",
    "random x 1": "1 with random text",
    "random x 8": "8 with random text",
    "random x 64": "64 with random text",
}


def speculation(source: Source) -> list[str]:
    """Guesses, by threads."""
    return _guesses(source, "speculation_avx512_bf16")


def draft_model(source: Source) -> list[str]:
    """Guesses of a draft model, by threads."""
    return _guesses(source, "speculation_draft_model_avx512_bf16")


def _guesses(source: Source, name: str) -> list[str]:
    lines = ["| threads | requests | times as fast, 95 % interval | predicted |", "|---|---|---|---|"]
    for threads, found in source.data(name)["threads"].items():
        measured = next(iter(found["rounds"].values()))[0]
        for workload in [each for each in SPECULATION_ROWS if f"{each}: tpot_ms" in measured]:
            gain, low, high = engines.speculation_gain(found, workload)
            rows_timed = WORKLOADS[workload][2] in STREAMS
            expected = f"{predicted(dict(found), workload):.2f}" if rows_timed else ""
            lines.append(f"| {threads} | {SPECULATION_ROWS[workload]} | {gain:.2f}, {low:.2f} to {high:.2f} | {expected} |")
    return [*lines, *source.origin(name)]


def speculation_peers(source: Source) -> list[str]:
    """Guesses beside those of others."""
    rounds = source.data("speculation_avx512_bf16")["peers"]["rounds"]
    lines = ["| | 1 that copies | 8 that copy |", "|---|---|---|"]
    for name, found in rounds.items():
        cells = [f"{statistics.median(each[f'{copies}: tpot_ms'] for each in found):.1f} ms" for copies in COPIES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, *source.origin("speculation_avx512_bf16")]


SCENES = {"hour": "Azure's hour in ten minutes, a minute of it with five times the load", "day": "a synthetic day"}
RULES = {"autoscaler": "autoscaler", "queue depth": "queue depth", "most": "sizes of the peak, always"}


def autoscale(source: Source) -> list[str]:
    """The autoscaler beside other rules."""
    lines = ["| scene | rule | in time | worker-hours / oracle's | turns of prefill, decode |", "|---|---|---|---|---|"]
    for scene, text in SCENES.items():
        for rule, name in RULES.items():
            run = source.data("autoscale")[scene]["runs"][rule]
            turns = "" if rule == "most" else ", ".join(str(number) for number in run["turns"].values())
            head = f"{text} " if rule == "autoscaler" else ""
            lines.append(f"| {head}| {name} | {100 * run['attainment']:.1f} % | {run['beside_oracle']:.2f} | {turns} |")
    return [*lines, *source.origin("autoscale")]


TABLES: dict[str, Callable[[Source], list[str]]] = {
    "figures": figures,
    "goodput": goodput,
    "engine": engine,
    "quality": quality,
    "kv-formats": kv_formats,
    "kv-quality": kv_quality,
    "speculation": speculation,
    "speculation-peers": speculation_peers,
    "draft-model": draft_model,
    "autoscale": autoscale,
}
