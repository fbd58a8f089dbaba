"""`tandem bench`: its flags are those of `vllm bench serve` where they mean the same. The work is done in `loadtest`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from cluster.commands.lib.flag_groups import expand_flags
from loadtest import bench as load_test
from loadtest import plots, report
from loadtest.options import BenchOptions
from protocol.errors import InvalidRequestError, UnavailableError


@dataclass(frozen=True)
class ResultOptions:
    """Where the figures of a load test go, beside the terminal. Raises InvalidRequestError for flags that do nothing."""

    save_result: Annotated[bool, Option("--save-result", help="Write the figures and every request as JSON.")] = False
    result_dir: Annotated[Path, Option(help="Where to.")] = Path()
    result_filename: Annotated[str | None, Option(help="Instead of a name made of backend, rate, model and time.")] = None
    plot: Annotated[Path | None, Option(help="Draw it into this PNG file.")] = None

    def __post_init__(self) -> None:
        for name in ("result_dir", "result_filename"):
            if not self.save_result and getattr(self, name) != getattr(type(self), name):
                raise InvalidRequestError(f"--{name.replace('_', '-')} needs --save-result", param=name)


@expand_flags
def bench(options: BenchOptions, results: ResultOptions) -> None:
    """Put load on a server that speaks OpenAI's API, and measure: throughput, latencies, goodput."""
    if results.plot is not None:
        plots.check_plot(results.plot)
    if results.save_result:
        report.check_result(results.result_dir, results.result_filename)
    console = Console()
    with report.display(Console(stderr=True)) as display:
        finished = asyncio.run(load_test.run_bench(options, display.report, display.started, display.done))
    saved: Path | None = None
    try:  # first what is kept: printing fails where nobody reads
        if results.save_result:
            saved = report.save_json(finished, results.result_dir, results.result_filename)
        if results.plot is not None:
            plots.plot(finished, results.plot)
    finally:
        report.print_report(finished, console)
    if saved is not None:
        console.print(f"saved {saved}", markup=False, soft_wrap=True, highlight=False)
    if not finished.figures["completed"]:
        raise UnavailableError("no request got an answer")
