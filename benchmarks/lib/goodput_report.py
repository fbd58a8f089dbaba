"""What `benchmarks.goodput` knows, of this run and earlier ones: merged, as Markdown, and as a picture of each workload."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.slo import ATTAINMENT, PAIRS, SCALES, SLOS, Run, Slo, goodput

Entry = dict[str, Any]
"""What was measured for one workload, system and seed: names, settings, `runs` and where they were made."""
_KEY = ("workload", "system", "seed")
OURS, PEERS = "tandem", ("vllm", "llama.cpp")
"""One prefill and one decode worker, whose name those of our other systems begin with; and what those of others begin with."""


def merge(known: Iterable[Entry], new: Entry) -> list[Entry]:
    """Return the known entries with the new one in place of the entry that it repeats, sorted."""
    by_key = {_key(entry): entry for entry in [*known, new]}
    return [by_key[key] for key in sorted(by_key)]


def _key(entry: Entry) -> tuple[str, str, int]:
    workload, system, seed = (entry[name] for name in _KEY)
    return workload, system, seed


def runs_of(entry: Entry) -> list[Run]:
    """Return the runs of an entry as records."""
    return [Run(run["step"], run["sent"], run["met"]) for run in entry["runs"]]


def goodputs(entries: Sequence[Entry], slo: Slo) -> list[float]:
    """Return the goodput of each entry, one for each seed, in requests per second."""
    return [goodput(runs_of(entry), slo)[0] for entry in entries]


def raw(entries: Sequence[Entry], figure: str) -> float:
    """Return the most that any run reached of a figure, within limits or not, as the median of the seeds."""
    return float(statistics.median(max(run[figure] for run in entry["runs"]) for entry in entries))


def by_workload(entries: Iterable[Entry]) -> dict[str, dict[str, list[Entry]]]:
    """Group entries by workload, then by system. Each group has an entry per seed."""
    found: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        found.setdefault(entry["workload"], {}).setdefault(entry["system"], []).append(entry)
    return found


def table(result: str, entries: Sequence[Entry], settings: Mapping[str, str]) -> str:
    """Return the table of this result in Markdown. `settings` describes the systems."""
    lines = [
        "# Goodput",
        "",
        f"The highest rate, in requests per second, at which {ATTAINMENT:.0%} of the requests meet their limits: medians of",
        "the seeds, lowest to highest in brackets. Failures, refusals and drops have missed them. Rates are on a grid with",
        "steps of 3 %; `below` is the next rate that was tried, and was bad. Raw: the most that any run reached, whatever",
        "the latencies.",
    ]
    for workload, systems in by_workload(entries).items():
        first = next(iter(systems.values()))[0]
        lines += ["", f"## {workload}", "", f"{first['prompts']}; {first['seconds']:g} s of load for each rate.", ""]
        lines += [*_limits_table(systems), "", f"![SLO curve]({picture_name(result, workload)})", "", *_scale_table(systems)]
    lines += ["", "## Systems", ""]
    lines += [f"- {name}: {about}" for name, about in sorted(settings.items())]
    return "\n".join([*lines, "", "Command: `python -m benchmarks.goodput --traces DIR --peer-env DIR`"])


def _limits_table(systems: Mapping[str, Sequence[Entry]]) -> list[str]:
    reference = [slo for slo in SLOS if slo.scale == 1.0]
    heads = [f"{slo.ttft_ms:g} / {slo.tpot_ms:g} ms" for slo in reference]
    lines = [
        f"| TTFT / TPOT | {' | '.join(heads)} | raw, requests/s | raw, tokens/s | load before | commit |",
        "|---" * (len(heads) + 5) + "|",
    ]
    for name, entries in systems.items():
        cells = [_cell(entries, slo) for slo in reference]
        cells += [f"{raw(entries, 'requests_per_s'):.2f}", f"{raw(entries, 'output_tokens_per_s'):.0f}"]
        cells.append(f"{max(entry['load_average'] for entry in entries):.1f}")
        cells.append(", ".join(sorted({entry["environment"]["commit"] for entry in entries})))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name in systems:
        ratios = [_ratio(systems, name, slo) for slo in reference]
        if name.startswith(OURS) and any(ratios):
            lines.append(f"| {name}, times the best peer | {' | '.join(ratios)} | | | | |")
    return lines


def _ratio(systems: Mapping[str, Sequence[Entry]], name: str, slo: Slo) -> str:
    """Of the medians; empty if it can't be said."""
    best = max((statistics.median(goodputs(systems[name], slo)) for name in systems if name.startswith(PEERS)), default=0.0)
    return f"{statistics.median(goodputs(systems[name], slo)) / best:.2f}" if best else ""


def _cell(entries: Sequence[Entry], slo: Slo) -> str:
    found = goodputs(entries, slo)
    nexts = [high for _, high in (goodput(runs_of(entry), slo) for entry in entries)]
    limit = "open" if None in nexts else f"{statistics.median(high for high in nexts if high is not None):.2f}"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}; below {limit})"


def _scale_table(systems: Mapping[str, Sequence[Entry]]) -> list[str]:
    lines = [f"| limits | system | {' | '.join(f'x {scale:g}' for scale in SCALES)} |", "|---" * (len(SCALES) + 2) + "|"]
    for ttft, tpot in PAIRS:
        for name, entries in systems.items():
            found = [statistics.median(goodputs(entries, Slo(ttft, tpot, scale))) for scale in SCALES]
            lines.append(f"| {ttft} / {tpot} ms | {name} | {' | '.join(f'{rate:.2f}' for rate in found)} |")
    return lines


def picture_name(result: str, workload: str) -> str:
    """Return the file name of a workload's picture."""
    return f"{result}_{workload}.png"


def draw(file: Path, workload: str, systems: Mapping[str, Sequence[Entry]]) -> None:
    """Draw goodput against the scale of the limits, one line for each system, with the range of the seeds around it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{workload}: requests/s of which {ATTAINMENT:.0%} meet their limits")
    panels = figure.subplots(1, len(PAIRS), sharey=True)
    for axes, (ttft, tpot) in zip(panels, PAIRS, strict=True):
        axes.set_title(f"TTFT {ttft} ms, TPOT {tpot} ms at scale 1")
        for name, entries in systems.items():
            found = [goodputs(entries, Slo(ttft, tpot, scale)) for scale in SCALES]
            [line] = axes.plot(SCALES, [statistics.median(each) for each in found], marker="o", label=name)
            lowest, highest = [min(each) for each in found], [max(each) for each in found]
            axes.fill_between(SCALES, lowest, highest, color=line.get_color(), alpha=0.15)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SCALES, [f"{scale:g}" for scale in SCALES])
        axes.set_xlabel("scale of both limits")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("goodput, requests/s")
    panels[0].set_ylim(bottom=0)  # of all, once all have drawn: it ends their scaling
    panels[0].legend()
    figure.savefig(file, dpi=110)
