"""What Python costs in a decode step of 16 sequences, 256 tokens each, one thread: `python -m benchmarks.step_overhead`.

A step's wall time less the time inside native code: the call that repeats the layers' recorded operators, and those of the
embedding, the head and sampling. All else counts as Python: laying out the batch, with NumPy and torch's few small operators,
the calls, reading results.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.native.build import load_alike
from engine.native.library import NativeLibrary
from engine.native.sampling import NativeSampler
from engine.native.signatures import LOGITS_SIGNATURES, LOOKUP_SIGNATURES
from protocol.sampling import SamplingParams

SEQUENCES, CONTEXT, BLOCK_SIZE, KV_TOKENS = 16, 256, 16, 8192
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
WARM_STEPS, STEPS = 5, 25


class Timed:
    """Functions that add the seconds that they take to a sum."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return call


def main() -> None:
    torch.set_num_threads(1)
    timed = time_operators()
    runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=KV_TOKENS)
    runner.pool.data.normal_()
    # Every 16th block is a sequence's next: scattered, as after some hours of service.
    tables = [range(i, runner.pool.num_blocks, SEQUENCES) for i in range(SEQUENCES)]
    chunks = [
        Chunk(token_ids=(50 + i,), start=CONTEXT, block_table=table, sampling=GREEDY, num_generated=1)
        for i, table in enumerate(tables)
    ]
    steps, outside = [], []
    for _ in range(WARM_STEPS + STEPS):
        timed.seconds = 0.0
        began = time.perf_counter()
        runner.execute(chunks)
        steps.append(time.perf_counter() - began)
        outside.append(1 - timed.seconds / steps[-1])
    result = {
        "step_ms": statistics.median(steps[WARM_STEPS:]) * 1e3,
        "overhead": statistics.median(outside[WARM_STEPS:]),
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def time_operators() -> Timed:
    """Time native code that steps of whatever is loaded from here on call, once they are recorded."""
    dtype = torch.bfloat16
    library = NativeLibrary.load(1, dtype)
    assert library is not None, "this machine has no native operators"
    library.prefer((), alike := load_alike(dtype))  # declares functions, as the sampler does
    NativeSampler(library)
    timed = Timed()
    for built in alike:
        for name in ("replay", *LOGITS_SIGNATURES, *LOOKUP_SIGNATURES, "sample"):
            setattr(built.functions, name, timed.of(getattr(built.functions, name)))
    return timed


if __name__ == "__main__":
    main()
