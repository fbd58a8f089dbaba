"""What the host takes for a decode step on a GPU: `python -m benchmarks.host_step`, on an idle machine; it needs no GPU.

Whole steps by `ModelRunner`, of an 8B model's shape: the batch is laid out, a graph's memory is filled, requests are packed for
the sampler, tokens are read. On the processor nothing is replayed and nothing launched, so what CUDA and Triton take for it is
left out: one replay, two launches and four copies a step. So is the scheduler, which plans a step before it is begun.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.lib.environment import write_result
from certify.shapes import LLAMA_8B
from configs.arithmetic import ceil_div
from engine.batch import Chunk, ForwardBatch
from engine.cuda_graphs import GraphedDecoder
from engine.device_sampler import sample_on_device
from engine.kernels.triton.launch import Launch
from engine.memory.block_table import BlockTable
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.sampler import SampleRequest
from protocol.sampling import SamplingParams

ROWS = (16, 64, 128, 256)
CONTEXT, BLOCK_SIZE = 4096, 16
SAMPLED = SamplingParams(seed=1, max_tokens=CONTEXT, temperature=0.8, top_p=0.95)
WARM_STEPS, STEPS = 20, 300


@dataclass(frozen=True)
class HostStep:
    """Medians of steps of so many rows, in ms; the parts were timed by themselves."""

    rows: int
    lay_out_ms: float
    fill_ms: float
    sample_ms: float
    step_ms: float
    """The whole step, which is more than its parts."""


def main() -> None:
    torch.set_num_threads(1)
    found = [measured(rows, WARM_STEPS, STEPS) for rows in ROWS]
    write_result("host_step", {"context": CONTEXT, "steps": [asdict(each) for each in found]}, table(found))


def measured(rows: int, warm_steps: int, steps: int) -> HostStep:
    """Time steps of `rows` single tokens, each with a context of CONTEXT."""
    blocks = ceil_div(CONTEXT + 1, BLOCK_SIZE)
    pool = KVPool(
        num_layers=1,
        num_blocks=rows * blocks,
        num_kept=0,
        block_size=BLOCK_SIZE,
        num_kv_heads=LLAMA_8B.num_kv_heads,
        head_dim=LLAMA_8B.head_dim,
        dtype=torch.bfloat16,
    )
    logits_SV = torch.zeros(rows, LLAMA_8B.vocab_size)
    weights: Any = None  # nothing is computed
    with torch.inference_mode(), patch.object(Launch, "run", lambda launch: None):
        decoder = GraphedDecoder(LLAMA_8B, weights, pool, lambda compute: (lambda: None, logits_SV), (rows,))
        runner = ModelRunner(LLAMA_8B, decoder.forward, sample_on_device, pool, "bfloat16", "none")
        runner.populator = None  # GPUs have none
        # Every so many blocks one is a sequence's next: scattered, as after some hours of service.
        tables = [BlockTable(0, range(row, pool.num_blocks, rows)) for row in range(rows)]
        chunks = [Chunk((7,), CONTEXT - row, table, SAMPLED, 1) for row, table in enumerate(tables)]
        batch = ForwardBatch.build(chunks, BLOCK_SIZE)
        requests = [SampleRequest(SAMPLED, chunk.end, 1) for chunk in chunks]

        def fill() -> None:
            for name in ("positions_T", "slots_T"):  # a new batch has to compute them
                batch.__dict__.pop(name, None)
            decoder.forward(batch, None)

        parts: tuple[Callable[[], object], ...] = (
            lambda: ForwardBatch.build(chunks, BLOCK_SIZE),
            fill,
            lambda: sample_on_device(logits_SV, requests),
            lambda: runner.execute(chunks),
        )
        return HostStep(rows, *(median_ms(part, warm_steps, steps) for part in parts))


def median_ms(part: Callable[[], object], warm_steps: int, steps: int) -> float:
    """Return the median of the times that a part takes."""
    times = []
    for step in range(warm_steps + steps):
        began = time.perf_counter()
        part()
        if step >= warm_steps:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def table(found: Sequence[HostStep]) -> str:
    """Return the result as a page has it."""
    lines = [
        "# What the host takes for a decode step on a GPU",
        "",
        f"Contexts of {CONTEXT:,} tokens in blocks of {BLOCK_SIZE}; median ms of {STEPS} steps. CUDA's own calls are left out.",
        "",
        "| rows | lay out the batch | fill the graph's memory | pack requests, read tokens | whole step |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.rows} | {each.lay_out_ms:.2f} | {each.fill_ms:.2f} | {each.sample_ms:.2f} | {each.step_ms:.2f} |"
        for each in found
    ]
    return "\n".join([*lines, "", "Command: `python -m benchmarks.host_step`"])


if __name__ == "__main__":
    main()
