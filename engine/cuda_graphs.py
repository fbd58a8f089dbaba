"""A decoder on a GPU, whose decode steps are CUDA graphs: one launch a step where there would be hundreds.

    made: for each number of rows, the largest first, a pass over an empty batch compiles what it needs and is captured
    step of single tokens ──► the smallest graph that holds it: its batch is filled, the graph replayed
    any other step ──► launched kernel by kernel

A graph reads the memory of its batch when it is replayed (`engine.operators.device_batch`), so it serves every batch of that
many rows or fewer. Graphs share their memory: the logits of one are good until the next step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool, most_blocks
from engine.models.decoder import Decoder, DecoderWeights
from engine.operators import step_factory
from engine.operators.device_batch import BatchShape, DeviceBatch
from engine.operators.triton_step import TritonStep
from engine.ranks.tensor_parallel import ALONE, TensorParallel

GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows of steps of single tokens that graphs may be captured for. Steps of more are launched kernel by kernel."""
_NO_TILES = np.zeros((0, 4), dtype=np.int64)

Capture = Callable[[Callable[[], Tensor | None]], tuple[Callable[[], None], Tensor | None]]
"""Makes of a computation something that repeats it, and the memory where its result will lie, if it has one."""


@dataclass(frozen=True)
class _Graph:
    batch: DeviceBatch
    replay: Callable[[], None]
    logits_SV: Tensor | None
    """None on every rank but the first."""


class GraphedDecoder:
    """A decoder whose decode steps run as CUDA graphs. Made and used in inference mode, from one thread at a time."""

    def __init__(
        self,
        facts: ModelFacts,
        weights: DecoderWeights,
        pool: KVPool,
        capture: Capture,
        rows: Sequence[int],
        ranks: TensorParallel = ALONE,
    ) -> None:
        """Capture graphs for steps of these numbers of rows. With several `ranks`, whose facts, weights and pool these are,
        collectives are part of the graphs, and all ranks capture in the same order.
        """
        self._pool = pool
        self._eager = Decoder(facts, weights, step_factory(facts, None), ranks)
        self._rows = sorted(rows)
        width = most_blocks(facts, pool)
        graphs = [_graph(facts, weights, pool, count, width, capture, ranks) for count in reversed(self._rows)]
        self._graphs = graphs[::-1]

    def forward(self, batch: ForwardBatch, on_layer: Callable[[int], None] | None) -> Tensor | None:
        """Return the logits of the sampled rows, as `Decoder.forward` does. The result is good until the next call."""
        rows = len(batch.token_ids_T)
        if on_layer is not None or not batch.only_decodes or rows > self._rows[-1]:
            return self._eager.forward(batch, self._pool, on_layer)
        graph = self._graphs[bisect_left(self._rows, rows)]
        graph.batch.fill(batch, _NO_TILES)
        graph.replay()
        return None if graph.logits_SV is None else graph.logits_SV[:rows]


def graph_rows(max_rows: int) -> Sequence[int]:
    """Return the rows of `GRAPH_ROWS` up to the first that hold `max_rows`, or all of them."""
    holding = next((i for i, rows in enumerate(GRAPH_ROWS) if rows >= max_rows), len(GRAPH_ROWS) - 1)
    return GRAPH_ROWS[: holding + 1]


def _graph(
    facts: ModelFacts,
    weights: DecoderWeights,
    pool: KVPool,
    rows: int,
    width: int,
    capture: Capture,
    ranks: TensorParallel,
) -> _Graph:
    shape = BatchShape(num_longer=0, num_longer_rows=0, num_tiles=0, num_singles=rows, table_width=width)
    batch = DeviceBatch(shape, pool.data.device)
    decoder = Decoder(facts, weights, lambda _, pool, frequencies: TritonStep(facts, batch, pool, frequencies), ranks)
    plan = ForwardBatch.of_singles(rows, 1, pool.block_size)  # what is computed with is in `batch`

    replay, logits_SV = capture(lambda: decoder.forward(plan, pool, None))
    return _Graph(batch, replay, logits_SV)


def cuda_capture() -> Capture:
    """Capture into CUDA graphs that share one pool of memory."""
    memory = torch.cuda.graph_pool_handle()
    before = torch.cuda.Stream()  # one for all: libraries keep memory for each stream that they have seen

    def capture(compute: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
        # Kernels are compiled and libraries set up outside of the capture, which allows neither.
        before.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(before):
            compute()
        torch.cuda.current_stream().wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog among them, may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result

    return capture
