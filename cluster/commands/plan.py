"""`tandem plan`: how many workers of each role, found by simulation. The work is done in `simulator`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.table import Table
from typer import Option

from cluster.commands.lib.flag_groups import expand_flags
from protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from configs.schema import ClusterConfig
    from simulator.goodput import Planned
    from simulator.profile import Profile
    from simulator.workload import Workload


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for. Raises InvalidRequestError, naming the flag, for values that don't go together."""

    slo: Annotated[str, Option(help="Limits in ms that 90 % of the requests have to meet.")] = "ttft:500,tpot:50"
    trace: Annotated[Path | None, Option(help="Azure's CSV or Mooncake's JSONL.")] = None
    dataset: Annotated[Literal["random"] | None, Option(help="Without a trace.")] = None
    random_input_len: Annotated[int, Option(help="Prompt tokens (random).")] = 1024
    random_output_len: Annotated[int, Option(help="Answer tokens (random).")] = 128
    random_range_ratio: Annotated[float, Option(help="Lengths vary by so much, from 0 to under 1.")] = 0.0
    random_prefix_len: Annotated[int, Option(help="Tokens at the beginning that all prompts share.")] = 0
    length_scale: Annotated[float, Option(help="Divides a trace's lengths.")] = 1.0
    num_prompts: Annotated[int, Option(help="Requests of each simulation.")] = 500
    rate: Annotated[float | None, Option(help="Requests per second to plan for; a trace's own by default.")] = None
    max_workers: Annotated[int, Option(help="Of both roles together.")] = 6
    profile: Annotated[Path | None, Option(help="Step times; by default this machine's, else a laptop's.")] = None
    config: Annotated[Path | None, Option(help="YAML file of the cluster: pools, chunk, limits.")] = None
    acceptance: Annotated[float | None, Option(help="Share of guessed tokens that are right, from 0 to 1.")] = None
    seed: Annotated[int, Option(help="Of prompts and arrivals.")] = 0
    plot: Annotated[Path | None, Option(help="Draw goodput by ratio into this PNG file.")] = None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.dataset is None):
            raise InvalidRequestError("give either --trace FILE or --dataset random", param="trace")
        for each in fields(self):
            is_idle = each.name.startswith("random_") if self.dataset is None else each.name == "length_scale"
            if is_idle and getattr(self, each.name) != each.default:
                others = "--dataset random" if self.dataset is None else "a --trace"
                raise InvalidRequestError(f"--{each.name.replace('_', '-')} is for {others}", param=each.name)
        if self.rate is not None and not self.rate > 0:
            raise InvalidRequestError(f"rate must be over 0; got {self.rate:g}", param="rate")
        if self.seed < 0:
            raise InvalidRequestError(f"seed must be at least 0; got {self.seed}", param="seed")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise InvalidRequestError(f"acceptance must be from 0 to 1; got {self.acceptance:g}", param="acceptance")


@expand_flags
def plan(options: PlanOptions) -> None:
    """Simulate clusters: which ratio of prefill to decode is best, and how many workers meet the targets."""
    from loadtest.plots import check_plot
    from simulator import plots

    if options.plot is not None:
        check_plot(options.plot)
    workload, planned, step_times = _planned(options)
    rate = workload.own_rate if options.rate is None else options.rate
    title = f"{workload.name}, {options.slo} ms"
    _print(planned, rate, title, options)
    Console(soft_wrap=True).print(step_times, markup=False, highlight=False)
    if options.plot is not None:
        plots.plot(planned, rate, title, options.plot)


def _planned(options: PlanOptions) -> tuple[Workload, Sequence[Planned], str]:
    """What is sent, the goodput of every cluster, and what was known of step times and context; shows progress.

    Raises InvalidRequestError or ConfigError.
    """
    from rich.progress import Progress

    from configs.loader import load_config
    from loadtest.metrics import parse_goodput
    from simulator import goodput

    targets = goodput.Targets(parse_goodput(options.slo.split(","), flag="slo", metrics=tuple(goodput.METRICS)))
    workload = _workload(options)
    profile, cluster, step_times = _step_times(load_config(options.config, {}), options.profile)
    if cluster.max_model_len is None:
        unknown = f"context: unknown until {cluster.model} is fetched; without max_model_len no request is too long for it"
        step_times = f"{step_times}\n{unknown}"
    if options.acceptance is not None:
        if cluster.speculative_config is None:
            raise InvalidRequestError("acceptance needs a --config with speculative_config", param="acceptance")
        profile = profile.model_copy(update={"acceptance": options.acceptance})
    with Progress(console=Console(stderr=True), transient=True) as progress:
        colocated = cluster.disaggregation == "never"
        task = progress.add_task("simulating", total=len(goodput.shapes(options.max_workers, colocated=colocated)))
        planned = goodput.plan(
            workload=workload,
            config=cluster,
            profile=profile,
            targets=targets,
            max_workers=options.max_workers,
            on_planned=lambda _: progress.advance(task),
        )
    return workload, planned, step_times


def _step_times(config: ClusterConfig, path: Path | None) -> tuple[Profile, ClusterConfig, str]:
    """Step times, the configuration with the context and sizes of steps that such a cluster has, and whose times they are.

    They are those in the file at `path`. Without one, this machine's for this model, if they were measured, else the laptop's.
    Raises InvalidRequestError if the file can't be used, ConfigError if the model can't.
    """
    from cluster.measured import known_profiles, measured_step_times, with_measured_sizes
    from cluster.memory import kv_token_bytes
    from configs.models import context_before_fetch, is_here, resolve_for
    from configs.paced.profile import load_paced_profile
    from simulator.profile import LAPTOP, Profile

    if config.engine == "paced":
        if path is not None:
            raise InvalidRequestError("--profile is not for engine: paced, which has its paced_profile", param="profile")
        paced = load_paced_profile(config.paced_profile)
        return Profile.of_paced(paced), _with_context(config, paced.context_tokens), f"step times: {paced.name}"
    facts = resolve_for(config).facts if is_here(config.model) else None
    context = context_before_fetch(config) if facts is None else facts.max_model_len
    if context is not None:
        config = _with_context(config, context)
    if path is not None:
        return Profile.load(path), config, f"step times: {path}"
    if facts is not None:
        known = known_profiles(config, facts)
        if (profile := measured_step_times(config, known)) is not None:
            whose = f"step times: {config.model} on this machine, as `tandem profile` shows them"
            return profile.with_token_bytes(kv_token_bytes(config, facts)), with_measured_sizes(config, known), whose
    profile = Profile.load(LAPTOP)
    laptop = f"{profile.machine['processor']}, {profile.machine['cores']} cores"
    whose = f"step times: smollm2 on a laptop ({laptop}); `tandem profile` measures {config.model} on this machine"
    return profile, config, whose


def _with_context(config: ClusterConfig, context_tokens: int) -> ClusterConfig:
    """The configuration with the model's context, where nobody chose a smaller one."""
    return config.model_copy(update={"max_model_len": config.max_model_len or context_tokens})


def _workload(options: PlanOptions) -> Workload:
    """The requests of each simulation. Raises InvalidRequestError for a trace that can't be used."""
    from loadtest.datasets import Lengths
    from simulator.workload import random_workload, trace_workload

    lengths = Lengths(
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )
    if options.trace is None:
        return random_workload(options.num_prompts, lengths, options.seed)
    return trace_workload(options.trace, options.num_prompts, options.length_scale, options.seed)


def _print(planned: Sequence[Planned], rate: float | None, title: str, options: PlanOptions) -> None:
    """A table with one row for each cluster, and a sentence that says which is enough for `rate` requests per second."""
    from simulator import goodput

    ratio = goodput.best_ratio(planned)
    enough = None if rate is None else goodput.smallest_for(planned, rate)
    table = Table(title=title)
    for column in ("cluster", "workers", "goodput, requests/s", "per worker", ""):
        table.add_column(column, justify="right")
    for each in planned:
        notes = [*(["best ratio"] if each is ratio and each.goodput else []), *(["enough"] if each is enough else [])]
        least = "at least " if each.too_few_requests else ""
        figures = (f"{least}{each.goodput:.2f}", f"{least}{each.per_worker:.2f}")
        table.add_row(str(each.shape), str(each.shape.workers), *figures, ", ".join(notes))
    console = Console()
    console.print(table)
    if not ratio.goodput:
        why = "a request alone is too slow for it" if ratio.refusal is None else f"a request is refused: {ratio.refusal}"
        console.print(f"no cluster meets {options.slo} at any rate: {why}", soft_wrap=True, highlight=False)
    elif rate is not None:
        wanted = f"{rate:.3g} requests/s"
        few = f"{options.max_workers} workers are too few for {wanted}"
        if any(each.too_few_requests for each in planned):
            few = f"{options.num_prompts} requests are too few for {wanted}: raise --num-prompts"
        console.print(f"{enough.shape} is enough for {wanted}" if enough else few)
