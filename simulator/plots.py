"""A picture of a plan: goodput by ratio, one line for each size of the cluster. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from protocol.errors import InvalidRequestError
from simulator.goodput import Planned


def plot(planned: Sequence[Planned], rate: float | None, title: str, path: Path) -> None:
    """Draw a plan into a PNG file. Raises InvalidRequestError if the file can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title)
    for workers in sorted({each.shape.workers for each in planned}):
        line = sorted((each for each in planned if each.shape.workers == workers), key=lambda each: each.shape.prefill)
        shares = [each.shape.prefill / workers for each in line]
        axes.plot(shares, [each.goodput for each in line], marker="o", label=f"{workers} workers")
        for share, each in zip(shares, line, strict=True):
            axes.annotate(str(each.shape), (share, each.goodput), textcoords="offset points", xytext=(0, 6), fontsize=8)
    if rate is not None:
        axes.axhline(rate, color="tab:red", linestyle="--", label=f"{rate:.3g} requests/s")
    axes.set_xlabel("share of prefill workers")
    axes.set_ylabel("goodput, requests/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be written: {error.strerror}", param="plot") from None
