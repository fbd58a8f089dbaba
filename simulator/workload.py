"""The requests that a simulated cluster gets: the datasets of `tandem bench`, at any rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np

from loadtest.arrivals import planned_times
from loadtest.datasets import Lengths, Sample, TraceRow, azure_rows, mooncake_rows, random_samples, trace_samples
from loadtest.fillers import Filler
from protocol.errors import InvalidRequestError
from simulator.request import Request

_FILLER = Filler(tuple(range(32_768)), "tokens")
"""Source of token ids. Their values don't matter, only which prompts begin alike."""
_BLOCK_TOKENS = 512
"""Tokens in a block of Mooncake's traces."""


@dataclass(frozen=True)
class Workload:
    """Prompts and lengths of answers, the same in every run."""

    name: str
    samples: Sequence[Sample]
    seed: int

    def at_rate(self, rate: float) -> list[Request]:
        """The requests with Poisson arrivals, `rate` per second. Raises InvalidRequestError if the rate is not over 0."""
        times = planned_times(len(self.samples), rate, 1.0, np.random.default_rng((self.seed, 1)))
        return [
            Request(index, float(at), [int(token) for token in sample.prompt], sample.output_len)
            for index, (at, sample) in enumerate(zip(times, self.samples, strict=True))
        ]

    @property
    def own_rate(self) -> float | None:
        """Requests per second from the first to the last time in the trace; None if it has no two times."""
        times = [sample.arrival_s for sample in self.samples if sample.arrival_s is not None]
        span_s = max(times) - min(times) if times else 0.0
        return len(times) / span_s if span_s else None

    def begin_alike(self, num_tokens: int) -> bool:
        """Tell whether some prompts have their first `num_tokens` in common, so that it matters what workers have cached."""
        long_enough = [sample.prompt[:num_tokens] for sample in self.samples if len(sample.prompt) >= num_tokens]
        return len(set(long_enough)) < len(long_enough)


def random_workload(num: int, lengths: Lengths, seed: int) -> Workload:
    """Random prompts, as of `tandem bench --dataset-name random`. Raises InvalidRequestError if there are none."""
    _check(num)
    return Workload("random", random_samples(num, lengths, _FILLER, np.random.default_rng((seed, 0))), seed)


def trace_workload(path: Path, num: int | None, length_scale: float, seed: int) -> Workload:
    """The first `num` requests, or all, of Azure's CSV or Mooncake's JSONL, lengths divided by `length_scale`.

    Raises InvalidRequestError if the file is neither, or too short.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise InvalidRequestError(f"{path}: a trace is Azure's .csv or Mooncake's .jsonl", param="trace")
    rows = azure_rows(path) if path.suffix == ".csv" else mooncake_rows(path)
    num = len(rows) if num is None else num
    _check(num)
    return Workload(path.stem, trace_samples(num, rows, length_scale, _FILLER, seed), seed)


def block_requests(rows: Sequence[TraceRow], speed: float) -> Iterator[Request]:
    """The requests of a trace that has hashes of its prompts' blocks, at `speed` times its pace.

    Each block's tokens are all the same number, another one than those of other blocks and of all answers. A request is made
    when it is taken, because its prompt may have 100,000 tokens.
    """
    for index, row in enumerate(rows):
        assert len(row.hash_ids) * _BLOCK_TOKENS >= row.input_len, "each block has a hash"
        blocks = chain.from_iterable(repeat(len(rows) + each, _BLOCK_TOKENS) for each in row.hash_ids)
        prompt = tuple(islice(blocks, max(1, row.input_len)))
        yield Request(index, row.arrival_s / speed, prompt, max(1, row.output_len))


def _check(num: int) -> None:
    if num < 1:
        raise InvalidRequestError(f"num-prompts must be at least 1; got {num}", param="num_prompts")
