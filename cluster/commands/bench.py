"""`tandem bench`: its flags are those of `vllm bench serve` where they mean the same. The work is done in `loadtest`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Backend(StrEnum):
    completions = "completions"
    chat = "chat"


class Dataset(StrEnum):
    random = "random"
    sharegpt = "sharegpt"
    azure = "azure"
    mooncake = "mooncake"
    text = "text"


def bench(
    base_url: Annotated[
        str | None, typer.Option(envvar="TANDEM_URL", help="The server; goes before --host and --port.")
    ] = None,
    host: Annotated[str, typer.Option(help="The server's host.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 8000,
    endpoint: Annotated[str | None, typer.Option(help="Path; by default the backend's.")] = None,
    backend: Annotated[Backend, typer.Option(help="Which of OpenAI's APIs.")] = Backend.completions,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar=["TANDEM_API_KEY", "OPENAI_API_KEY"], help="Bearer key for the server.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The server's first one if not given.")] = None,
    dataset_name: Annotated[Dataset, typer.Option(help="What is sent.")] = Dataset.random,
    dataset_path: Annotated[Path | None, typer.Option(help="File of the dataset (all but random).")] = None,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens (random, text).")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Answer tokens (random, text).")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths vary by so much, from 0 to under 1.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Tokens at the beginning that all prompts share.")] = 0,
    sharegpt_output_len: Annotated[int | None, typer.Option(help="Answer tokens, instead of the file's.")] = None,
    length_scale: Annotated[float, typer.Option(help="Divides a trace's lengths.")] = 1.0,
    time_scale: Annotated[
        float | None, typer.Option(help="Send at a trace's own times, multiplied by this (10: ten times slower).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 1000,
    num_warmups: Annotated[int, typer.Option(help="Requests before the run, not measured.")] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests per second on average; inf sends all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson. Less: in bursts. More: evenly.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at the server at a time; others wait here.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have their full length (not in OpenAI's API).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft, ttst, tpot, itl, e2el.")] = "ttft,ttst,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Such as 50,90,99.")] = "50,90,99",
    goodput: Annotated[list[str] | None, typer.Option(help="Limits in ms, such as ttft:500 tpot:50.")] = None,
    more_goodput: Annotated[list[str] | None, typer.Argument(metavar="METRIC:MS", help="Further limits of --goodput.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the figures and every request as JSON.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to.")] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Instead of a name made of backend, rate, model and time.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG file.")] = None,
) -> None:
    """Put load on a server that speaks OpenAI's API, and measure: throughput, latencies, goodput."""
    import asyncio

    from rich.console import Console

    from loadtest import plots, report
    from loadtest.bench import run_bench
    from loadtest.metrics import parse_goodput, parse_metrics, parse_percentiles
    from loadtest.options import BenchOptions
    from loadtest.server import ENDPOINTS
    from protocol.errors import InvalidRequestError, UnavailableError

    if more_goodput and not goodput:
        raise InvalidRequestError(f"what is {more_goodput[0]!r:.40}? Limits go after --goodput", param="goodput")
    options = BenchOptions(
        base_url=base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        api_key=api_key,
        backend=backend.value,
        endpoint=endpoint or ENDPOINTS[backend.value],
        model=model,
        dataset_name=dataset_name.value,
        dataset_path=dataset_path,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        random_prefix_len=random_prefix_len,
        sharegpt_output_len=sharegpt_output_len,
        length_scale=length_scale,
        time_scale=time_scale,
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        seed=seed,
        percentile_metrics=parse_metrics(percentile_metrics),
        metric_percentiles=parse_percentiles(metric_percentiles),
        goodput=parse_goodput([*(goodput or ()), *(more_goodput or ())]),
        timeout_s=timeout,
    )
    if plot is not None:
        plots.check_plot(plot)
    console = Console()
    with report.display(Console(stderr=True)) as display:
        finished = asyncio.run(run_bench(options, display.report, display.started, display.done))
    report.print_report(finished, console)
    if save_result:
        console.print(f"saved {report.save_json(finished, result_dir, result_filename)}", soft_wrap=True, highlight=False)
    if plot is not None:
        plots.plot(finished, plot)
    if not finished.figures["completed"]:
        raise UnavailableError("no request got an answer")
