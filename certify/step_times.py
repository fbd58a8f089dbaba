"""Whole steps of the engine, from chunks to sampled tokens on the host: which are measured, and the least that they need."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from certify.findings import Device
from certify.shapes import kv_bytes_per_token, matrix_parameters
from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
ID_LIMIT = 40_000
"""Token ids are drawn below it: every model of interest has them."""
STEPS = 20
WARM_STEPS = 3


@dataclass(frozen=True)
class StepSizes:
    """The steps that are measured: prompts, and single tokens of so many sequences."""

    prefill_tokens: Sequence[int]
    decode_rows: Sequence[int]
    context: int
    """Tokens of each sequence of a decode step."""

    @property
    def pool_tokens(self) -> int:
        """The tokens of a pool that holds them."""
        return max(*self.prefill_tokens, max(self.decode_rows) * self.context)


SIZES: dict[Device, StepSizes] = {
    "cuda": StepSizes((2048, 8192), (1, 4, 16, 64), 4096),
    "cpu": StepSizes((64, 256), (1, 4), 128),
}


@dataclass(frozen=True)
class MeasuredStep:
    """A step to be measured."""

    name: str
    tokens: int
    """Tokens that the step computes."""
    is_decode: bool
    chunks: Sequence[Chunk]
    moved_bytes: float
    """Bytes of weights and KV that must be read."""
    flops: float


def measured_steps(facts: ModelFacts, sizes: StepSizes, dtype: torch.dtype, block_size: int) -> Iterator[MeasuredStep]:
    """Yield the steps of a model of this shape."""
    matrices, head = matrix_parameters(facts), facts.vocab_size * facts.hidden_size
    weight_bytes, token_bytes = (matrices + head) * dtype.itemsize, kv_bytes_per_token(facts, dtype)
    heads = facts.num_heads * facts.head_dim * facts.num_layers
    for tokens in sizes.prefill_tokens:
        yield MeasuredStep(
            name=f"prefill {tokens:,} tokens",
            tokens=tokens,
            is_decode=False,
            chunks=[prompt(tokens, block_size, min(facts.vocab_size, ID_LIMIT))],
            moved_bytes=weight_bytes,
            flops=2 * matrices * tokens + 2 * tokens * tokens * heads + 2 * head,
        )
    for rows in sizes.decode_rows:
        yield MeasuredStep(
            name=f"decode {rows} at {sizes.context:,}",
            tokens=rows,
            is_decode=True,
            chunks=decode_chunks(rows, sizes.context, block_size),
            moved_bytes=weight_bytes + rows * sizes.context * token_bytes,
            flops=2 * (matrices + head) * rows + 4 * rows * sizes.context * heads,
        )


def prompt(tokens: int, block_size: int, id_limit: int) -> Chunk:
    """Return the chunk of a prompt of this many tokens, with ids below `id_limit`."""
    table = range(ceil_div(tokens, block_size))
    return Chunk(token_ids=token_ids(tokens, id_limit), start=0, block_table=table, sampling=GREEDY, num_generated=0)


def decode_chunks(rows: int, context: int, block_size: int) -> list[Chunk]:
    """Return the chunks of a decode step of sequences with their blocks mixed.

    What the pool holds was left by others; times do not depend on it.
    """
    width = context // block_size
    tables = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).view(rows, width).tolist()
    return [
        Chunk(token_ids=(50 + row,), start=context - 1, block_table=table, sampling=GREEDY, num_generated=1)
        for row, table in enumerate(tables)
    ]


def token_ids(count: int, limit: int = ID_LIMIT) -> list[int]:
    """Return this many token ids from 100 on, below `limit`."""
    rng = random.Random(count)
    return [rng.randrange(100, limit) for _ in range(count)]


def step_s(runner: ModelRunner, step: MeasuredStep, *, graphs: bool = True) -> float:
    """Return the median time of a step in seconds. Without `graphs`, a GPU's kernels are launched one by one."""
    on_layer = None if graphs else lambda layer: None
    return median_s(lambda: runner.execute(step.chunks, on_layer), runner.pool.data.is_cuda)


def median_s(step: Callable[[], object], on_gpu: bool = True) -> float:
    """Return the median time of a step in seconds, the work of the GPU included."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    taken = []
    for index in range(WARM_STEPS + STEPS):
        synchronize()
        began = time.perf_counter()
        step()
        synchronize()
        if index >= WARM_STEPS:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)
