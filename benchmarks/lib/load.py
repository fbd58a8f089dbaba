"""What benchmarks send to a server, by the client of `tandem bench`, in this process: the same client for every system.

Answers have the length that was asked for (`ignore_eos`). Two loads share no prompt of random tokens unless
their seeds are equal: a server's prefix cache has nothing of the one for the other. Pieces of prose may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from loadtest.bench import Finished, run_bench
from loadtest.options import BenchOptions

PROSE = ROOT / "benchmarks" / "texts" / "public_domain.txt"


@dataclass(frozen=True)
class RandomPrompts:
    """Random prompts, with lengths in tokens."""

    input_len: int
    output_len: int

    def options(self) -> dict[str, Any]:
        """The options of a load test that sends these prompts."""
        return {"dataset_name": "random", "random_input_len": self.input_len, "random_output_len": self.output_len}


@dataclass(frozen=True)
class TextPrompts:
    """Prompts that are pieces of English prose, with lengths in tokens.

    An answer to random tokens may have characters of several tokens each, and a gap between two of these is none between
    two tokens.
    """

    input_len: int
    output_len: int

    def options(self) -> dict[str, Any]:
        """The options of a load test that sends these prompts."""
        lengths = {"random_input_len": self.input_len, "random_output_len": self.output_len}
        return {"dataset_name": "text", "dataset_path": PROSE, **lengths}


@dataclass(frozen=True)
class Trace:
    """Prompts with the lengths of a trace's first requests, divided by `length_scale`."""

    dataset: str
    """The kind of trace: azure or mooncake."""
    path: Path
    length_scale: float

    def options(self) -> dict[str, Any]:
        """The options of a load test that sends these prompts."""
        return {"dataset_name": self.dataset, "dataset_path": self.path, "length_scale": self.length_scale}


@dataclass(frozen=True)
class CopyPrompts:
    """Prompts whose answers repeat much of them (`loadtest.copying`), with the length of answers in tokens."""

    output_len: int

    def options(self) -> dict[str, Any]:
        """The options of a load test that sends these prompts."""
        return {"dataset_name": "copy", "random_output_len": self.output_len}


Prompts = RandomPrompts | TextPrompts | Trace

WARM_UP, WARM_UPS = RandomPrompts(256, 32), 16
_WARM_UP_SEED = 2**31
"""The seed of warm-ups, which no measurement has."""


def bench_options(
    url: str,
    prompts: Prompts | CopyPrompts,
    *,
    num_prompts: int,
    seed: int,
    request_rate: float = float("inf"),
    max_concurrency: int | None = None,
    num_warmups: int = 0,
    timeout_s: float = 120.0,
    time_scale: float | None = None,
    temperature: float = 0.0,
) -> BenchOptions:
    """Return the options of a load test with Poisson arrivals at this rate, or at a trace's own times if there is a
    `time_scale`, or all at once. Raises InvalidRequestError.
    """
    return BenchOptions(
        base_url=url,
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        ignore_eos=True,
        seed=seed,
        percentile_metrics="ttft,tpot,itl",
        timeout_s=timeout_s,
        time_scale=time_scale,
        temperature=temperature,
        **prompts.options(),
    )


async def put_load(options: BenchOptions) -> Finished:
    """Run a load test without showing it.

    Raises InvalidRequestError for a trace that does not fit, UnavailableError if the server answers nothing."""
    return await run_bench(options, lambda text: None, lambda planned: None, lambda record: None)


async def warm_up(url: str) -> None:
    """Send some requests, several at a time.

    Raises RuntimeError if one fails, its answer has not the length that was asked for, or the server tells no token ids: it
    would be compared with others that do other work.
    """
    found = await put_load(bench_options(url, WARM_UP, num_prompts=WARM_UPS, seed=_WARM_UP_SEED, max_concurrency=8))
    if found.unit != "tokens":
        raise RuntimeError("warm-up: the server has no /tokenize")
    for record in found.records:
        if not record.ok or record.completion_tokens != WARM_UP.output_len:
            wrong = record.error or f"an answer of {record.completion_tokens} tokens instead of {WARM_UP.output_len}"
            raise RuntimeError(f"warm-up: {wrong}")
