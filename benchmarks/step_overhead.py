"""What Python costs in a decode step of 16 sequences, 256 tokens each, one thread: `python -m benchmarks.step_overhead`.

A step's wall time less the time inside operators, where operators are what torch's profiler records at the top level, and the
native library's, which it does not see. All else counts as Python: laying out the batch, numpy included, the
calls between operators, reading results.

The profiler itself takes time, partly inside the operators that it times, partly between them, and does not say which. So there
are two bounds. Low: operators' time under the profiler against the plain step's, as if all of the profiler's own time were
inside. High: against the profiled step's, as if all of it were between. Plain and profiled steps alternate.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.native.build import load_library
from engine.native.library import LOGITS_SIGNATURES, SIGNATURES
from protocol.sampling import SamplingParams

SEQUENCES, CONTEXT, BLOCK_SIZE, KV_TOKENS = 16, 256, 16, 8192
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
WARM_STEPS, STEPS = 3, 12


def main() -> None:
    torch.set_num_threads(1)
    runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=KV_TOKENS)
    runner.pool.data.normal_()

    def step() -> None:
        # Every 16th block is a sequence's next: scattered, as after some hours of service.
        tables = [range(i, runner.pool.num_blocks, SEQUENCES) for i in range(SEQUENCES)]
        runner.execute(
            [
                Chunk(token_ids=(50 + i,), start=CONTEXT, block_table=table, sampling=GREEDY, num_generated=1)
                for i, table in enumerate(tables)
            ]
        )

    for _ in range(WARM_STEPS):
        step()
        profiled_s(step)
    plain, profiled, operators = [], [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        plain.append(time.perf_counter() - began)
        whole_s, operators_s = profiled_s(step)
        profiled.append(whole_s)
        operators.append(operators_s)
    step_s, whole_s, operators_s = (statistics.median(times) for times in (plain, profiled, operators))
    result = {
        "step_ms": step_s * 1e3,
        "profiled_step_ms": whole_s * 1e3,
        "operators_ms": operators_s * 1e3,
        "overhead_low": 1 - operators_s / step_s,
        "overhead_high": 1 - operators_s / whole_s,
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def profiled_s(step: Callable[[], None]) -> tuple[float, float]:
    """Wall seconds of a step under the profiler, and of the operators that it called."""
    with native_functions_recorded(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began
    events: Any = profiler.events()
    return took, sum(event.cpu_time_total for event in events if event.cpu_parent is None) / 1e6


@contextmanager
def native_functions_recorded() -> Iterator[None]:
    built = load_library(torch.bfloat16)
    library = None if built is None else built.functions
    functions = {name: getattr(library, name) for name in SIGNATURES | LOGITS_SIGNATURES} if library else {}
    for name, function in functions.items():
        setattr(library, name, recorded(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, seen by the profiler."""

    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call


if __name__ == "__main__":
    main()
