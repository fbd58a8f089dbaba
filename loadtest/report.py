"""The figures of a load test as a table, as a file, and the progress of one that runs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.bench import Finished
from loadtest.cache_shares import TURN_PERCENTILES
from loadtest.metrics import METRICS, percentile_name
from loadtest.records import RequestRecord
from protocol.errors import InvalidRequestError, printable

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

    def started(self, num_requests: int) -> None:
        """Show a bar for this many requests."""
        self._progress.reset(self._task, total=num_requests, description="running")
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
    if options.multi_turn:
        console.print(_turns(finished))
    if finished.stages:
        stages = Table(title="Where the time went, as the server tells", title_justify="left")
        for column in ("stage", "mean ms", "p99 ms", "share"):
            stages.add_column(column, justify="left" if column == "stage" else "right")
        for stage, values in finished.stages.items():
            stages.add_row(_plain(stage), f"{values['mean_ms']:.2f}", f"{values['p99_ms']:.2f}", f"{values['share']:.1%}")
        console.print(stages)
    errors = [record.error for record in finished.records if record.error is not None]
    for error in list(dict.fromkeys(errors))[:5]:
        console.print(f"[red]failed {errors.count(error)} times:[/red]", _plain(error), highlight=False)
    if finished.client.warning is not None:
        console.print(f"[yellow]warning:[/yellow] {finished.client.warning}", highlight=False)


def check_file(path: Path, param: str) -> None:
    """Raise InvalidRequestError, naming the flag, if no file can be written at `path`; before the run, not after it."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            return  # a device or a pipe, which may wait for its reader
        is_new = not os.path.lexists(path)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error, param) from None


def check_result(folder: Path, name: str | None) -> None:
    """Make the folder that `save_json` writes to. Raises InvalidRequestError if it could write no file there."""
    path = folder / (name or ".result.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path.parent, error, "result_dir") from None
    check_file(path, "result_dir")


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
        raise _unwritable(path, error, "result_dir") from None
    return path


def _unwritable(path: Path, error: OSError, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: can't be written: {error.strerror}", param=param)


def _plain(text: str) -> str:
    """A text of others for the terminal: nothing in it is markup, and nothing commands the terminal."""
    return escape(printable(text))


def _totals(finished: Finished) -> Table:
    options, figures = finished.options, finished.figures
    table = Table(title=_plain(f"{finished.model} at {options.url}"), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "Requests that were answered": f"{figures['completed']}",
        "Requests that failed": f"{figures['failed']}",
        "Duration (s)": f"{figures['duration']:.2f}",
        "Prompt tokens": f"{figures['total_input_tokens']}",
        **_cached_rows(figures),
        "Generated tokens": f"{figures['total_output_tokens']}",
        "Request throughput (1/s)": f"{figures['request_throughput']:.3f}",
        "Output throughput (tokens/s)": f"{figures['output_throughput']:.1f}",
        "Total throughput (tokens/s)": f"{figures['total_token_throughput']:.1f}",
    }
    if options.limits_ms:
        limits = ", ".join(f"{metric} {limit:g} ms" for metric, limit in options.limits_ms.items())
        rows[f"Goodput (1/s) within {limits}"] = f"{figures['request_goodput']:.3f}"
        rows["Requests within it, of all that were sent"] = f"{figures['goodput_attainment']:.1%}"
    if options.multi_turn:
        rows["Conversations that came to their end"] = f"{figures['conversations_completed']}"
        rows["Conversations that a failure ended"] = f"{figures['conversations_failed']}"
        rows["Questions that were therefore not sent"] = f"{figures['turns_not_sent']}"
    if options.length_scale != 1.0:
        rows["Trace lengths divided by"] = f"{options.length_scale:g}"
    if options.time_scale is not None:
        rows["Trace times multiplied by"] = f"{options.time_scale:g}"
    rooms = {"max-concurrency": options.max_concurrency, "multi-turn-concurrency": options.multi_turn_concurrency}
    if waits := [name for name, limit in rooms.items() if limit is not None]:
        rows[f"Longest wait for {' and '.join(waits)} (ms)"] = f"{1000 * _longest_wait(finished):.1f}"
    client = finished.client
    rows["Client: late (p99 ms), loop held up (p99 ms), CPU"] = (
        f"{client.p99_lateness * 1000:.2f}, {client.p99_loop_lag * 1000:.2f}, {client.cpu_share:.0%}"
    )
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _cached_rows(figures: Mapping[str, Any]) -> dict[str, str]:
    """What was cached, if the server tells, of all prompt tokens and, in conversations, of the reusable ones."""
    if figures["cached_share"] is None:
        return {}
    rows = {"Prompt tokens that were cached": f"{figures['total_cached_tokens']} ({figures['cached_share']:.1%})"}
    if "cached_of_reusable" in figures:
        rows["Cached, of reusable prompt tokens"] = _percent(figures["cached_of_reusable"])
    return rows


def _turns(finished: Finished) -> Table:
    table = Table(title="Turn by turn; first tokens in ms", title_justify="left")
    percentiles = [percentile_name(each) for each in TURN_PERCENTILES]
    shares = ("cached", "of reusable")
    for column in ("turn", "answered", "failed", "prompt tokens", *shares, *(f"ttft {name}" for name in percentiles)):
        table.add_column(column, justify="right")
    for turn in finished.figures["per_turn_metrics"]:
        done = turn["completed"]
        times = (turn[f"{name}_ttft_ms"] for name in percentiles)
        table.add_row(
            str(turn["turn_index"] + 1),
            str(done),
            str(turn["failed"]),
            f"{turn['total_input_tokens'] / done:.0f}" if done else "-",
            _percent(turn["cached_share"]),
            _percent(turn["cached_of_reusable"]),
            *("-" if each is None else f"{each:.2f}" for each in times),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _longest_wait(finished: Finished) -> float:
    return max((record.at_sent - record.at_dispatched for record in finished.records), default=0.0)
