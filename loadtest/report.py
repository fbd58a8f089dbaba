"""The figures of a load test as a table, as a file, and the progress of one that runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.arrivals import Times
from loadtest.bench import Finished
from loadtest.metrics import METRICS, percentile_name
from loadtest.records import RequestRecord
from protocol.errors import InvalidRequestError

_REFRESH_S = 0.5


class Display:
    """What is shown while a load test runs.

    The event loop itself draws it, seldom: a drawing thread would hold up the stamps.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._failed = 0
        self._drawn_at = 0.0

    def report(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text)
        self._progress.refresh()

    def started(self, planned: Times) -> None:
        """Show a bar for this many requests."""
        self._progress.reset(self._task, total=len(planned), description="running")
        self._progress.refresh()

    def done(self, record: RequestRecord) -> None:
        """Advance the bar by a request that has ended."""
        self._failed += not record.ok
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._drawn_at >= _REFRESH_S:
            self._drawn_at = now
            failed = f", {self._failed} failed" if self._failed else ""
            self._progress.update(self._task, description=f"running{failed}", refresh=True)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """Show the progress of a load test on a console while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        yield Display(progress)


def print_report(finished: Finished, console: Console) -> None:
    """Print counts and rates, latencies, where the time went, and what to know before believing the figures."""
    options, figures = finished.options, finished.figures
    console.print(_totals(finished))
    latencies = Table(title="Latencies in ms", title_justify="left")
    latencies.add_column("")
    columns = ["mean", "median", *map(percentile_name, options.percentiles)]
    for column in columns:
        latencies.add_column(column, justify="right")
    for metric in options.shown_metrics:
        cells = (figures[f"{column}_{metric}_ms"] for column in columns)
        latencies.add_row(METRICS[metric], *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    console.print(latencies)
    if finished.stages:
        stages = Table(title="Where the time went, as the server tells", title_justify="left")
        for column in ("stage", "mean ms", "p99 ms", "share"):
            stages.add_column(column, justify="left" if column == "stage" else "right")
        for stage, values in finished.stages.items():
            stages.add_row(stage, f"{values['mean_ms']:.2f}", f"{values['p99_ms']:.2f}", f"{values['share']:.1%}")
        console.print(stages)
    errors = [record.error for record in finished.records if record.error is not None]
    for error in list(dict.fromkeys(errors))[:5]:
        console.print(f"[red]failed {errors.count(error)} times:[/red]", error, markup=True, highlight=False)
    if finished.client.warning is not None:
        console.print(f"[yellow]warning:[/yellow] {finished.client.warning}", highlight=False)


def save_json(finished: Finished, folder: Path, name: str | None) -> Path:
    """Write the result as JSON and return its path.

    The name is made of backend, rate, model and time if none is given. Raises InvalidRequestError.
    """
    result = finished.as_json()
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", finished.model)
    rate = f"{finished.options.request_rate:g}qps"
    path = folder / (name or f"{finished.options.backend}-{rate}-{model}-{result['date']}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidRequestError(f"{path}: can't be written: {error.strerror}", param="result_dir") from None
    return path


def _totals(finished: Finished) -> Table:
    options, figures = finished.options, finished.figures
    table = Table(title=f"{finished.model} at {options.url}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "Requests that were answered": f"{figures['completed']}",
        "Requests that failed": f"{figures['failed']}",
        "Duration (s)": f"{figures['duration']:.2f}",
        "Prompt tokens": f"{figures['total_input_tokens']}",
        "Generated tokens": f"{figures['total_output_tokens']}",
        "Request throughput (1/s)": f"{figures['request_throughput']:.3f}",
        "Output throughput (tokens/s)": f"{figures['output_throughput']:.1f}",
        "Total throughput (tokens/s)": f"{figures['total_token_throughput']:.1f}",
    }
    if options.limits_ms:
        limits = ", ".join(f"{metric} {limit:g} ms" for metric, limit in options.limits_ms.items())
        rows[f"Goodput (1/s) within {limits}"] = f"{figures['request_goodput']:.3f}"
        rows["Requests within it, of all that were sent"] = f"{figures['goodput_attainment']:.1%}"
    if options.length_scale != 1.0:
        rows["Trace lengths divided by"] = f"{options.length_scale:g}"
    if options.time_scale is not None:
        rows["Trace times multiplied by"] = f"{options.time_scale:g}"
    if options.max_concurrency is not None:
        rows["Longest wait for max-concurrency (ms)"] = f"{1000 * _longest_wait(finished):.1f}"
    client = finished.client
    rows["Client: late (p99 ms), loop held up (p99 ms), CPU"] = (
        f"{client.p99_lateness * 1000:.2f}, {client.p99_loop_lag * 1000:.2f}, {client.cpu_share:.0%}"
    )
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _longest_wait(finished: Finished) -> float:
    return max((record.at_sent - record.at_dispatched for record in finished.records), default=0.0)
