"""Pages take results with exactly the systems and workloads that the parts of `make bench` run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks import speculation as script
from benchmarks import unshared
from benchmarks.cache_simulation import GAPS, NAMES, gap_closed
from benchmarks.lib import servers
from benchmarks.lib.environment import RESULTS
from benchmarks.lib.row_times import DRAFTS, STREAMS, row_name
from benchmarks.pages.figures.servers import GOODPUT_SYSTEMS, goodput_of
from benchmarks.pages.results import Result, owner, read_results
from benchmarks.pages.tables import Source, figures, goodput, speculation, speculation_peers
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.history import History

ENVIRONMENT = {"processor": "A processor (avx2)", "cores": 2, "commit": "a9b2d9748a78"}
RATES = ("ttft_p50_ms", "output_tokens_per_s", "itl_p99_ms", "ratio", "long_ttft_p50_ms", "tpot_p50_ms")
LENGTH = {"azure-conversation": 3, "azure-code": 1, "mooncake-conversation": 1, "200-in-200-out": 1}


def option(name: str, option: str) -> list[str]:
    """What a part says of an option, or the option's default."""
    part = next(part for part in PARTS if part.name == name)
    parser = argparse.ArgumentParser()
    servers.add_options(parser)
    words = list(part.arguments)
    given = words[words.index(option) + 1] if option in words else str(parser.get_default(option.removeprefix("--")))
    return given.split(",")


def made(name: str, data: Mapping[str, Any]) -> Result:
    return Result(name, *owner(name), {**data, "environment": ENVIRONMENT})


def of_rounds(part: str, names: Sequence[str] = RATES) -> dict[str, Any]:
    systems = option(part, "--systems")
    return {"rounds": {system: [dict.fromkeys(names, 10.0 + n)] for n, system in enumerate(systems)}, "settings": {}}


def entries(part: str, commit: str = "a9b2d9748a78", **of_system: str) -> list[dict[str, Any]]:
    runs = [{"step": 40, "sent": 20, "met": [20] * 99}]
    template = json.loads((RESULTS / "goodput_avx512_bf16.json").read_text())["entries"]
    known = {(entry["workload"], entry["system"], entry["seed"]): entry["runs"] for entry in template}
    return [
        {
            "workload": workload,
            "system": system,
            "seed": seed,
            "runs": known.get((workload, system, seed), runs),
            "environment": {**ENVIRONMENT, "commit": of_system.get(system.partition(":")[0].replace("-", "_"), commit)},
        }
        for workload in option(part, "--workloads")
        for system in option(part, "--systems")
        for seed in range(LENGTH[workload])
    ]


def speculated() -> dict[str, Any]:
    def round_of(gain: float) -> dict[str, float]:
        counters = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "engine_steps", "engine_tokens")
        return {f"{name}: tpot_ms": 10 / gain for name in script.WORKLOADS} | {
            f"{name}: {counter}": 10.0 for name in script.WORKLOADS for counter in counters
        }

    rows = {row_name(streams, drafts): 1.0 for streams in STREAMS for drafts in DRAFTS}
    rounds = {"plain": [round_of(1), round_of(1.1)], "ngram": [round_of(2), round_of(2.1)]}
    peers = {name: [round_of(1)] for name in ("tandem, plain", "tandem, ngram", "vllm", "vllm ngram")}
    return {
        "config": script.CONFIG,
        "threads": {str(threads): {"rows_ms": rows, "rounds": rounds} for threads in script.THREADS},
        "peers": {"rounds": peers, "settings": {}},
    }


@pytest.fixture
def source() -> Source:
    """All results, those of these parts as `make bench` writes them."""
    results = {result.name: result for result in read_results()}
    for name, data in {
        "throughput_avx512_bf16": of_rounds("throughput"),
        "throughput_amx": of_rounds("throughput"),
        "interference_avx512_bf16": of_rounds("interference"),
        "goodput_avx512_bf16": {"entries": entries("goodput") + entries("goodput_others")},
        "speculation_avx512_bf16": speculated(),
    }.items():
        results[name] = made(name, data)
    return Source(results, History(), "")


def test_tables_and_figures_are_made_of_them(source: Source) -> None:
    rows = figures(source)
    assert len(rows) == 7
    assert "throughput_amx" in rows[-1], "not the older result of another name"
    assert "| 11 tokens/s, `tandem-auto` | 14 tokens/s, `vllm` |" in rows[2], "the best of each, by name"
    assert len(goodput(source)) >= 2 + len(LENGTH)
    assert len(speculation(source)) >= 2 + len(script.WORKLOADS) * len(script.THREADS)
    assert "| vllm ngram | 10.0 ms | 10.0 ms |" in speculation_peers(source)
    for name in ("throughput_amx", "interference_avx512_bf16", "goodput_avx512_bf16", "speculation_avx512_bf16"):
        assert 1 <= len(source.results[name].figures) <= 8, name


def test_the_worst_random_text_counts(source: Source) -> None:
    shown = [figure.name for figure in source.results["speculation_avx512_bf16"].figures]
    assert len(shown) == 3 * len(script.THREADS)


def test_a_draft_model_has_no_goals() -> None:
    drafted = made("speculation_draft_model_avx512_bf16", {**speculated(), "config": script.CONFIGS["draft_model"]})
    assert len(drafted.figures) == 3 * len(script.THREADS)
    assert all(figure.goal is None for figure in drafted.figures)


def test_systems_of_several_commits_are_not_compared() -> None:
    whole = {"entries": entries("goodput")}
    assert all(goodput_of(whole, "azure-conversation", system) for system in GOODPUT_SYSTEMS)
    mixed = {"entries": entries("goodput", vllm="e4e14eef5311")}
    assert not any(goodput_of(mixed, "azure-conversation", system) for system in GOODPUT_SYSTEMS)
    assert made("goodput_avx512_bf16", mixed).figures == []
    assert goodput_of(whole, "azure-code", "tandem") == [], "not measured"


def test_only_the_commits_of_shown_systems_count() -> None:
    older = {
        "system": "llama.cpp",
        "workload": "azure-code",
        "seed": 0,
        "environment": {**ENVIRONMENT, "commit": "0123456789ab"},
    }
    result = made("goodput_avx512_bf16", {"entries": [*entries("goodput"), older]})
    assert result.commits == ["a9b2d9748a78"]


def test_a_simulation_of_caches_has_figures() -> None:
    runs = {mode: dict.fromkeys(GAPS, 10.0 - n) for n, mode in enumerate(NAMES)}
    result = made("cache_simulation", {"runs": runs, "gap_closed": gap_closed(runs)})
    assert len(result.figures) == len(GAPS)


def test_what_caches_cost_is_judged_by_the_upper_end() -> None:
    rounds = {name: [dict.fromkeys(unshared.FIGURES, n + 1.0)] * 3 for n, name in enumerate(unshared.SYSTEMS)}
    assert unshared.ratios(rounds, "ttft_ms") == [2.0] * 3
    costs = {figure: {"median": 1.0, "low": 0.9, "high": 1.1} for figure in unshared.FIGURES}
    result = {"rounds": rounds, "costs": costs, "requests": 1, "singles": 1, "load_average_before": 0.0}
    assert [figure.value for figure in made("unshared_avx512_bf16", result).figures] == [1.1, 1.1]
    assert "| 1.000 | 0.900 to 1.100 |" in unshared.table(result)
