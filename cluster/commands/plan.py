"""`tandem plan`: how many workers of each role, found by simulation. The work is done in `simulator`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dataset(StrEnum):
    random = "random"


def plan(
    slo: Annotated[str, typer.Option(help="Limits in ms that 90 % of the requests have to meet.")] = "ttft:500,tpot:50",
    trace: Annotated[Path | None, typer.Option(help="Azure's CSV or Mooncake's JSONL.")] = None,
    dataset: Annotated[Dataset | None, typer.Option(help="Without a trace.")] = None,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens (random).")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Answer tokens (random).")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by so much, from 0 to under 1.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens at the beginning that all prompts share.")] = 0,
    length_scale: Annotated[float, typer.Option(help="Divides a trace's lengths.")] = 1.0,
    num_prompts: Annotated[int, typer.Option(help="Requests of each simulation.")] = 500,
    rate: Annotated[float | None, typer.Option(help="Requests per second to plan for; a trace's own by default.")] = None,
    max_workers: Annotated[int, typer.Option(help="Of both roles together.")] = 6,
    profile: Annotated[Path | None, typer.Option(help="From benchmarks/machine_profile.py; by default a laptop's.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the cluster: pools, chunk, limits.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw goodput by ratio into this PNG file.")] = None,
) -> None:
    """Simulate clusters: which ratio of prefill to decode is best, and how many workers meet the targets."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from configs.loader import load_config
    from loadtest.datasets import Lengths
    from loadtest.metrics import parse_goodput
    from loadtest.plots import check_plot
    from protocol.errors import InvalidRequestError
    from simulator import goodput, plots
    from simulator.profile import LAPTOP, Profile
    from simulator.workload import random_workload, trace_workload

    if (trace is None) == (dataset is None):
        raise InvalidRequestError("give either --trace FILE or --dataset random", param="trace")
    if rate is not None and not rate > 0:
        raise InvalidRequestError(f"rate must be over 0; got {rate:g}", param="rate")
    if plot is not None:
        check_plot(plot)
    targets = goodput.Targets(parse_goodput(slo.split(",")))
    lengths = Lengths(random_input_len, random_output_len, random_range_ratio, random_prefix_len)
    if trace is None:
        workload = random_workload(num_prompts, lengths, seed)
    else:
        workload = trace_workload(trace, num_prompts, length_scale, seed)
    rate = workload.own_rate if rate is None else rate
    measured = Profile.load(LAPTOP if profile is None else profile)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(goodput.shapes(max_workers)))
        planned = goodput.plan(
            workload, load_config(config, {}), measured, targets, max_workers, lambda _: progress.advance(task)
        )
    console = Console()
    ratio = goodput.best_ratio(planned)
    enough = None if rate is None else goodput.smallest_for(planned, rate)
    table = Table(title=f"{workload.name}, {slo} ms")
    for column in ("cluster", "workers", "goodput, requests/s", "per worker", ""):
        table.add_column(column, justify="right")
    for each in planned:
        notes = [*(["best ratio"] if each is ratio else []), *(["enough"] if each is enough else [])]
        table.add_row(
            str(each.shape), str(each.shape.workers), f"{each.goodput:.2f}", f"{each.per_worker:.2f}", ", ".join(notes)
        )
    console.print(table)
    if not ratio.goodput:
        console.print(f"no cluster meets {slo} at any rate: a request alone is too slow for it")
    elif rate is not None:
        wanted = f"{rate:.3g} requests/s"
        console.print(f"{enough.shape} is enough for {wanted}" if enough else f"{max_workers} workers are too few for {wanted}")
    if plot is not None:
        plots.plot(planned, rate, f"{workload.name}, {slo} ms", plot)
