"""The result of `benchmarks.engine` as a table in Markdown and a plot."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.lib import arithmetic
from benchmarks.lib.environment import operators
from configs.facts import ModelFacts

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OVERHEAD_GOAL, START_GOAL_S = 0.10, 6.0
COLOURS = {"tandem": "#1b6ca8", "baseline": "#9ec5e3", "vllm": "#e08e2b", "llama.cpp": "#5b8c5a", "transformers": "#8a6fa8"}


@dataclass
class Run:
    """All that a run of `benchmarks.engine` measured."""

    systems: list[str]
    """Names of the systems, ours first."""
    threads: list[int]
    versions: dict[str, str]
    """What each system says of its version. For the baseline it is the commit."""
    rounds: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    """Figures of each round by system and threads: tokens per second by case, and the machine's limits beside ours."""
    step_overhead: list[dict[str, float]] = field(default_factory=list)
    worker_start: list[dict[str, float]] = field(default_factory=list)

    def medians(self, system: str, threads: int) -> dict[str, float]:
        """Return the medians of a system's figures over its rounds."""
        return medians(self.rounds[system, threads])

    def as_json(self) -> dict[str, Any]:
        """Return the run for the file of results."""
        measured = [
            {"system": system, "threads": threads, "medians": medians(rounds), "spread": spread(rounds), "rounds": rounds}
            for (system, threads), rounds in self.rounds.items()
        ]
        own = {"step_overhead": self.step_overhead, "worker_start": self.worker_start}
        return {"versions": self.versions, "measured": measured, **own}


def goals() -> dict[tuple[str, str], float]:
    """Return what our tokens per second divided by the peer's should reach at least on this machine, by case and peer."""
    prefill = 1.0 if operators() == "amx" else 4.0
    return {
        **{(f"prefill {tokens}", "vllm"): 1.0 for tokens in (256, 1024)},
        **{(f"decode {size} x 256", "vllm"): 1.2 for size in (1, 8, 16, 32, 64)},
        ("decode 16 x 1024", "vllm"): 1.2,
        ("decode 1 x 4096", "vllm"): 1.2,
        ("decode 1 x 256", "llama.cpp"): 1.2,
        **{(f"prefill {tokens}", "llama.cpp"): prefill for tokens in (256, 1024)},
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every figure over the rounds."""
    return {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}


def spread(rounds: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the least and the most of every figure over the rounds."""
    return {name: (min(round_[name] for round_ in rounds), max(round_[name] for round_ in rounds)) for name in rounds[0]}


def report(run: Run, facts: ModelFacts, command: str, plot_file: Path) -> str:
    """Draw the plot into a file, and return the table in Markdown."""
    plot(run, facts, plot_file)
    rounds = len(run.rounds[run.systems[0], run.threads[0]])
    lines = [
        "# The engine beside its peers",
        "",
        f"{facts.name}, tokens per second of wall time; medians of {rounds} rounds in turns. "
        "A ratio is ours divided by the peer's.",
        "",
        f"![]({plot_file.name})",
    ]
    for threads in run.threads:
        lines += ["", f"## {_threads(threads)}", "", *_table(run, facts, threads)]
    lines += ["", "## Beside the throughput", "", *_own_lines(run)]
    versions = ", ".join(f"{system} {version}" for system, version in run.versions.items())
    lines += ["", f"Systems: {versions}. How each is set up: `benchmarks/peers/measure_*.py`.", "", f"Command: `{command}`"]
    return "\n".join(lines)


def share_of_limit(facts: ModelFacts, case: str, tokens_per_s: float, limits: dict[str, float]) -> float:
    """Return the share of the machine's limit that a case reaches.

    The limit is arithmetic for a prefill, in bfloat16 or float32, whichever is faster here, and bandwidth for decoding.
    """
    kind, numbers = case.split(" ", 1)
    if kind == "prefill":
        flop = arithmetic.prefill_flop(facts, int(numbers))
        fastest = max(value for name, value in limits.items() if name.endswith("GFLOP/s"))
        return tokens_per_s / int(numbers) * flop / (fastest * 1e9)
    sequences, context = (int(number) for number in numbers.split(" x "))
    steps_per_s = tokens_per_s / sequences
    return steps_per_s * arithmetic.decode_bytes(facts, sequences, context) / (limits["read GB/s"] * 1e9)


def _table(run: Run, facts: ModelFacts, threads: int) -> list[str]:
    ours, others = run.systems[0], run.systems[1:]
    wanted = goals()
    with_goals = {peer for _, peer in wanted}
    by_system = {system: run.medians(system, threads) for system in run.systems}
    columns = ["", ours, "share of the limit"]
    for other in others:
        columns += [other, f"ratio to {other}", *(["goal"] if other in with_goals else [])]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for case in _cases(by_system[ours]):
        own = by_system[ours][case]
        row = [case, f"{own:.0f}", f"{share_of_limit(facts, case, own, by_system[ours]):.0%}"]
        for other in others:
            theirs, goal = by_system[other].get(case), wanted.get((case, other))
            row += [f"{theirs:.0f}", f"{own / theirs:.2f}"] if theirs else ["", ""]
            if other in with_goals:
                row.append(f"≥ {goal:.1f}" if goal else "")
        lines.append("| " + " | ".join(row) + " |")
    limits = ", ".join(f"{value:.0f} {name}" for name, value in by_system[ours].items() if name.endswith("/s"))
    return [
        *lines,
        "",
        f"The machine, {_threads(threads)}: {limits}. The limit of a prefill is the faster arithmetic, of decoding reading.",
    ]


def _own_lines(run: Run) -> list[str]:
    overhead, start = medians(run.step_overhead), medians(run.worker_start)
    return [
        "| | measured | goal |",
        "|---|---|---|",
        f"| Python in a step outside operators, batch 16, one thread | {overhead['overhead']:.1%} of "
        f"{overhead['step_ms']:.1f} ms | ≤ {OVERHEAD_GOAL:.0%} |",
        f"| a worker's start, process to ready | {start['ready_s']:.1f} s: imports {start['imports_s']:.1f}, "
        f"weights and socket {start['weights_and_socket_s']:.1f}, KV pool {start['pool_s']:.1f} | ≤ {START_GOAL_S:.0f} s |",
    ]


def plot(run: Run, facts: ModelFacts, file: Path) -> None:
    """Draw a row per number of threads, with prefill and decode on scales of their own."""
    figure, axes = plt.subplots(
        len(run.threads), 2, figsize=(13, 3.6 * len(run.threads)), width_ratios=(3, 10), layout="constrained", squeeze=False
    )
    for row, threads in zip(axes, run.threads, strict=True):
        by_system = {system: run.medians(system, threads) for system in run.systems}
        for axis, kind in zip(row, ("prefill", "decode"), strict=True):
            cases = [case for case in _cases(by_system[run.systems[0]]) if case.startswith(kind)]
            _bars(axis, cases, run, threads)
            axis.set_title(f"{kind}, {_threads(threads)}", loc="left", fontsize=10)
            axis.set_ylabel("tokens/s")
    axes[0][1].legend(frameon=False, ncols=len(run.systems), loc="upper left")
    figure.suptitle(f"{facts.name}: the engine beside its peers", x=0.01, ha="left")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _bars(axis: Any, cases: list[str], run: Run, threads: int) -> None:
    """One group per case; whiskers from the worst round to the best."""
    width = 0.8 / len(run.systems)
    for number, system in enumerate(run.systems):
        middle, ends = run.medians(system, threads), spread(run.rounds[system, threads])
        shown = [(place, case) for place, case in enumerate(cases) if case in middle]
        heights = [middle[case] for _, case in shown]
        below = [middle[case] - ends[case][0] for _, case in shown]
        above = [ends[case][1] - middle[case] for _, case in shown]
        places = [place + (number - (len(run.systems) - 1) / 2) * width for place, _ in shown]
        whiskers = {"yerr": [below, above], "ecolor": "#444444", "error_kw": {"linewidth": 0.8}}
        bars = axis.bar(places, heights, width * 0.92, label=system, color=COLOURS[system], **whiskers)
        axis.bar_label(bars, fmt="%.0f", fontsize=5.5, padding=1.5, rotation=90)
    axis.set_xticks(range(len(cases)), [case.split(" ", 1)[1] for case in cases], fontsize=8)
    axis.margins(x=0.02, y=0.22)
    axis.spines[["top", "right"]].set_visible(False)


def _cases(measured: dict[str, float]) -> list[str]:
    return [name for name in measured if name.startswith(("prefill", "decode"))]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
