"""A picture of a load test: distributions, how latency went over the run, where the time went. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loadtest.bench import Finished
from loadtest.metrics import values_of
from loadtest.report import check_file
from protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plot(path: Path) -> None:
    """Raise InvalidRequestError if no picture could be drawn there; before the run, not after it."""
    if path.suffix.lower() != ".png":
        raise InvalidRequestError(f"plot writes PNG: {path} should end in .png", param="plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequestError("plot needs matplotlib: .venv/bin/pip install --editable '.[plot]'", param="plot") from None
    check_file(path, "plot")


def plot(finished: Finished, path: Path) -> None:
    """Draw the picture of a load test into a PNG file. Raises InvalidRequestError if it can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    options, figures = finished.options, finished.figures
    figure.suptitle(
        f"{finished.model}, {options.dataset_name}, {figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:.0f} output tokens/s, {figures['failed']} failed"
    )
    _distribution(axes[0, 0], finished, ("ttft", "ttst"), "Time to first and second token")
    _distribution(axes[0, 1], finished, ("tpot", "itl"), "Time per output token, gaps between tokens")
    _course(axes[1, 0], finished)
    if finished.stages:
        _stages(axes[1, 1], finished)
    else:
        _distribution(axes[1, 1], finished, ("e2el",), "End-to-end latency")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be written: {error.strerror}", param="plot") from None


def _distribution(axes: Axes, finished: Finished, metrics: Sequence[str], title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of values below")
    axes.set_ylim(0, 1.02)
    for metric in metrics:
        values = np.sort(np.asarray(values_of(finished.records, metric))) * 1000
        if len(values):
            shares = np.arange(len(values) + 1) / len(values)
            axes.step(np.concatenate((values[:1], values)), shares, where="post", label=metric.upper())
        if metric in finished.options.limits_ms:
            axes.axvline(finished.options.limits_ms[metric], color="tab:red", linestyle="--", label=f"{metric.upper()} limit")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _course(axes: Axes, finished: Finished) -> None:
    axes.set_title("Over the run")
    axes.set_xlabel("planned time, s")
    axes.set_ylabel("time to first token, ms")
    done = [record for record in finished.records if record.ok and record.ttft is not None]
    axes.scatter([record.at_planned for record in done], [1000 * (record.ttft or 0.0) for record in done], s=12)
    failed = [record.at_planned for record in finished.records if not record.ok]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), marker="x", color="tab:red", label="failed")
        axes.legend()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _stages(axes: Axes, finished: Finished) -> None:
    axes.set_title("Where the time went, as the server tells")
    axes.set_xlabel("mean per request, ms")
    names = list(finished.stages)
    means = [finished.stages[name]["mean_ms"] for name in names]
    bars = axes.barh(names, means)
    axes.bar_label(bars, labels=[f"{finished.stages[name]['share']:.1%}" for name in names], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
