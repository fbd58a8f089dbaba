"""Draws docs/throughput.svg from the committed results of the throughput benchmark: `python docs/throughput_chart.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

TARGET = Path(__file__).with_name("throughput.svg")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
INK, QUIET = "#1f2328", "#59636e"
OURS, OTHERS = "#0969da", "#9ea7b3"
WIDTH, LEFT, RIGHT = 960, 220, 860
BAR, GAP = 24, 8
LOAD = "SmolLM2-135M, 16 streams at a time, 256 tokens in, 128 out. Weights: vLLM bfloat16, Tandem four bits."


@dataclass(frozen=True)
class Bar:
    name: str
    tokens_per_s: float
    ours: bool


@dataclass(frozen=True)
class Group:
    """The bars of one machine."""

    machine: str
    bars: tuple[Bar, ...]


def read_groups() -> tuple[Group, ...]:
    """The medians over rounds on an AMD machine and on an Intel machine with AMX."""
    return tuple(_group(_read(name)) for name in ("throughput_avx512_bf16.json", "throughput_amx.json"))


def _group(result: Any) -> Group:
    """The fastest of Tandem's pairs of workers and of vLLM's sizes of steps, as README's table has them."""
    medians = {name: median(run["output_tokens_per_s"] for run in runs) for name, runs in result["rounds"].items()}
    pairs = [name for name in medians if name.startswith("tandem") and "colocated" not in name]
    ours = max(pairs, key=medians.__getitem__)
    peer = max((name for name in medians if name.startswith("vllm")), key=medians.__getitem__)
    size = peer.partition(":")[2]
    name = f"vLLM 0.32, {size} a step" if size else "vLLM 0.32, its own step"
    return Group(_machine(result), (Bar("Tandem", medians[ours], True), Bar(name, medians[peer], False)))


def draw(groups: tuple[Group, ...]) -> str:
    """Horizontal bars, a group per machine, as SVG."""
    most = max(bar.tokens_per_s for group in groups for bar in group.bars)
    parts, y = [_text(24, 34, "Output tokens per second", "title"), _text(24, 56, LOAD, "quiet")], 92
    for group in groups:
        parts.append(_text(24, y, group.machine, "machine"))
        y += 16
        for bar in group.bars:
            parts.append(_bar(bar, y, (RIGHT - LEFT) * bar.tokens_per_s / most))
            y += BAR + GAP
        y += 30
    height = y - 30 + 8
    style = (
        "text{font-family:-apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;font-size:14px;"
        f"fill:{INK}}}.title{{font-size:17px;font-weight:600}}.quiet{{fill:{QUIET}}}.machine{{font-weight:600}}"
        ".name{text-anchor:end}.ours{font-weight:600}"
    )
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(_describe(groups))}</title>",
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        )
    )


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _machine(result: Any) -> str:
    environment = result["environment"]
    cores = f", {environment['cores']} cores" if "cores" in environment else ""
    return f"{environment['processor']}{cores}, commit {environment['commit'][:7]}"


def _bar(bar: Bar, y: int, length: float) -> str:
    colour, weight = (OURS, " ours") if bar.ours else (OTHERS, "")
    baseline = y + BAR - 7
    return (
        f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" rx="3" fill="{colour}"/>'
        f'<text x="{LEFT - 10}" y="{baseline}" class="name{weight}">{escape(bar.name)}</text>'
        f'<text x="{LEFT + length + 8:.0f}" y="{baseline}" class="{weight.strip()}">{bar.tokens_per_s:.0f}</text>'
    )


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def _describe(groups: tuple[Group, ...]) -> str:
    """The figures in words, for readers who do not see the picture."""
    machines = (
        f"{group.machine}: " + ", ".join(f"{bar.name} {bar.tokens_per_s:.0f}" for bar in group.bars) for group in groups
    )
    return "Output tokens per second. " + "; ".join(machines)


if __name__ == "__main__":
    TARGET.write_text(draw(read_groups()))
