"""Milliseconds of decode steps with drafts, as JSON: `python -m benchmarks.lib.row_times THREADS QUANTIZATION`.

The default model. Each stream has its newest token and so many drafts, laid out as workers do.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from configs.arithmetic import ceil_div
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

STREAMS = (1, 8)
DRAFTS = (0, 1, 2, 3, 4)
CONTEXT = 350
"""About the middle of an answer of `benchmarks.speculation`."""
_BLOCK_SIZE = 16
_REPEATS = 15
_GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)


def row_name(streams: int, drafts: int) -> str:
    """Return the name of a figure: streams, and drafts of each."""
    return f"{streams} x {drafts}"


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    quantization: Any = sys.argv[2]
    runner = ModelRunner.load(
        resolve("smollm2").facts, dtype="auto", quantization=quantization, block_size=_BLOCK_SIZE, num_kv_tokens=16_384
    )
    runner.pool.data.normal_()
    cases = {row_name(streams, drafts): _step(streams, drafts) for streams in STREAMS for drafts in DRAFTS}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + _REPEATS):
        for name, chunks in cases.items():
            began = time.perf_counter()
            runner.execute(chunks)
            times[name].append(time.perf_counter() - began)
    print(json.dumps({name: statistics.median(each[1:]) * 1e3 for name, each in times.items()}))


def _step(streams: int, drafts: int) -> list[Chunk]:
    width = ceil_div(CONTEXT + DRAFTS[-1] + 1, _BLOCK_SIZE)
    return [
        Chunk([50 + i], CONTEXT + i, range(stream * width, (stream + 1) * width), _GREEDY, 1 + i, continues=i > 0)
        for stream in range(streams)
        for i in range(1 + drafts)
    ]


if __name__ == "__main__":
    main()
