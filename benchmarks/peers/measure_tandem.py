"""Tandem's engine, one rank: `measure_tandem.py THREADS`, with a checkout on PYTHONPATH.

The default model in its default dtype. Prefill of one prompt in chunks of 512; decode steps of sequences in scattered blocks of
a pool of noise. All of `ModelRunner.execute` counts: laying out the batch, the model, greedy sampling. Beside it, in the same
process, what the machine can do: products of large matrices and reading of memory far larger than the caches.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from lines import DECODE_STEPS, Cases, claim_stdout, decode_name, fastest_dtype, median_s, prefill_name, serve

from configs.arithmetic import ceil_div
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

CHUNK_TOKENS, BLOCK_SIZE, KV_TOKENS = 512, 16, 65_536
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
MATRIX = 2048
READ_FLOATS = 1 << 27
"""512 MiB."""


def main() -> None:
    channel = claim_stdout()
    torch.set_num_threads(int(sys.argv[1]))
    runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=KV_TOKENS)
    runner.pool.data.normal_()
    serve(channel, runner.dtype_name, lambda cases: measure(runner, cases))


def measure(runner: ModelRunner, cases: Cases) -> dict[str, float]:
    measured = machine_limits()
    for n in cases.prefill:
        measured[prefill_name(n)] = n / median_s(partial(prefill, runner, n))
    return measured | {decode_name(*case): decode(runner, *case) for case in cases.decode}


def prefill(runner: ModelRunner, length: int) -> None:
    tokens = [(7 * i * i + 13 * i) % 49_000 + 17 for i in range(length)]
    for start in range(0, length, CHUNK_TOKENS):
        last = start + CHUNK_TOKENS >= length
        chunk = Chunk(tokens[start : start + CHUNK_TOKENS], start, range(length // BLOCK_SIZE), GREEDY if last else None, 0)
        runner.execute([chunk])


def decode(runner: ModelRunner, size: int, context: int) -> float:
    """Tokens per second."""
    step = decode_step(runner, size, context)
    step(0)
    began = time.perf_counter()
    for number in range(1, DECODE_STEPS + 1):
        step(number)
    return size * DECODE_STEPS / (time.perf_counter() - began)


def decode_step(runner: ModelRunner, size: int, context: int) -> Callable[[int], None]:
    """Computes the given step of `DECODE_STEPS` + 1."""
    blocks = list(range(runner.pool.num_blocks))
    random.Random(0).shuffle(blocks)
    needed = ceil_div(context + DECODE_STEPS + 1, BLOCK_SIZE)
    tables = [blocks[i * needed : (i + 1) * needed] for i in range(size)]

    def run(number: int) -> None:
        runner.execute([Chunk((50 + i,), context + number, table, GREEDY, number) for i, table in enumerate(tables)])

    return run


def machine_limits() -> dict[str, float]:
    """GFLOP/s and GB/s with this process's threads, each by the fastest of torch's ways.

    In bfloat16 only where oneDNN multiplies it: torch by itself takes minutes for what float32 takes a second for.
    """
    limits = {}
    multiplies_bfloat16 = fastest_dtype() == "bfloat16"
    for dtype in (torch.bfloat16, torch.float32) if multiplies_bfloat16 else (torch.float32,):
        x, weight = torch.randn(MATRIX, MATRIX).to(dtype), torch.randn(MATRIX, MATRIX).to(dtype)
        ways: list[Callable[[], object]] = [lambda x=x, weight=weight: x @ weight]  # type: ignore[misc]
        if multiplies_bfloat16:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, MATRIX)
            ways.append(
                lambda x=x, packed=packed: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # type: ignore[misc]
            )
        name = str(dtype).removeprefix("torch.")
        limits[f"{name} GFLOP/s"] = 2 * MATRIX**3 / min(median_s(way, 5) for way in ways) / 1e9
    memory = torch.ones(READ_FLOATS)
    halves = memory.view(2, -1)
    read_s = min(median_s(way, 5) for way in (memory.sum, lambda: torch.dot(halves[0], halves[1])))
    return limits | {"read GB/s": memory.nbytes / read_s / 1e9}


if __name__ == "__main__":
    main()
