"""Several ranks of a GPU worker, run on a CPU: graphs with their collectives inside, over gloo, by Triton's interpreter.

Each rank is a process, for the interpreter serves one thread. What NCCL does is in tests/gpu.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from certify.kernels.cases import DEVICE, relative_error
from configs.facts import ModelFacts
from configs.sharding import rank_facts
from engine import cuda_graphs
from engine.batch import Chunk, ForwardBatch
from engine.cuda_graphs import Capture, GraphedDecoder
from engine.kernels.triton.layers import add_parts
from engine.memory.kv_pool import KVPool
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.operators.triton_step import TritonStep
from engine.ranks.tensor_parallel import ALONE, TensorParallel, connect
from protocol.errors import WorkerLostError
from protocol.sampling import SamplingParams
from tests.cases import slow

SAMPLED = SamplingParams(seed=0, max_tokens=1)
BLOCK_SIZE = 8
DEADLINE_S = 60.0
"""For connecting, and for each collective."""
STEPS = [
    [Chunk(list(range(20)), 0, [4, 9, 2], SAMPLED, 0), Chunk([8, 7], 0, [5], None, 0)],
    [Chunk([3], 20, [4, 9, 2], SAMPLED, 1), Chunk([6], 2, [5], SAMPLED, 0)],
    [Chunk([1], 3, [5], SAMPLED, 1)],
    [Chunk([3], 21, [4, 9, 2], SAMPLED, 2), Chunk([6], 4, [5], None, 0)],
]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="weights of these tests are on the CPU; tests/gpu has real ranks")


class Recorded(TensorParallel):
    """Notes each collective with what it is asked for."""

    def __init__(self, real: TensorParallel) -> None:
        super().__init__(real.rank, real.size, real._group)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def sum(self, part: Tensor) -> Tensor:
        self.asked.append(("sum", tuple(part.shape)))
        return super().sum(part)

    def columns(self, part_SV: Tensor, widths: Sequence[int]) -> Tensor | None:
        self.asked.append(("columns", (part_SV.shape[0], *widths)))
        return super().columns(part_SV, widths)


def repeated(compute: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
    """In place of a capture."""
    result = compute()

    def replay() -> None:
        again = compute()
        if result is not None and again is not None:
            result.copy_(again)

    return replay, result


def dies(compute: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
    """In place of the first capture."""
    os._exit(1)


def computed(facts: ModelFacts, ranks: TensorParallel, capture: Capture = repeated) -> list[Tensor | None]:
    """The logits of all steps on this rank; the steps of single tokens by graphs."""
    own = rank_facts(facts, ranks.size)
    with patch.object(cuda_graphs, "step_factory", lambda facts, _: partial(TritonStep.of, facts)), torch.inference_mode():
        weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None), ranks.rank, ranks.size)
        pool = KVPool.for_model(own, 512, BLOCK_SIZE, torch.float32)
        pool.data.zero_()
        decoder = GraphedDecoder(own, weights, pool, capture, (1, 2), ranks)
        results = [decoder.forward(ForwardBatch.build(chunks, BLOCK_SIZE), None) for chunks in STEPS]
        return [None if logits is None else logits.clone() for logits in results]


def rank_process(told: Connection, facts: ModelFacts, rank: int, size: int, rendezvous: str, capture: Capture) -> None:
    torch.set_num_threads(1)
    ranks = Recorded(connect(FileStore(rendezvous, size), rank, size, torch.device("cpu"), "127.0.0.1", DEADLINE_S))
    least = ranks.least(100 - rank, torch.device("cpu"))
    told.send("connected")
    try:
        logits = computed(facts, ranks, capture)
        told.send(([None if one is None else one.numpy() for one in logits], ranks.asked, least))
    except BaseException as error:
        told.send(error)
        raise


@contextmanager
def running(facts: ModelFacts, captures: Sequence[Capture], folder: Path) -> Iterator[list[Connection]]:
    """A process for each rank, which makes its graphs by its own one of `captures`. All are connected."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in captures]
    shared = (len(captures), str(folder / "store"))
    processes = [
        context.Process(target=rank_process, args=(pipes[rank][1], facts, rank, *shared, capture), daemon=True)
        for rank, capture in enumerate(captures)
    ]
    try:
        for process in processes:
            process.start()
        ends = [ours for ours, _ in pipes]
        assert [answer(each) for each in ends] == ["connected"] * len(captures)
        yield ends
    finally:
        for process in processes:
            process.kill()
            process.join()


def answer(rank: Connection, patience_s: float = 120) -> Any:
    assert rank.poll(patience_s), "a rank hangs"
    return rank.recv()


@on_cpu
@pytest.mark.filterwarnings("ignore")  # of rows that hold whatever their memory held
@pytest.mark.parametrize("size", [2, *slow([4, 8])])
def test_graphs_of_several_ranks_say_what_one_says(size: int, small_model: Callable[..., Any], tmp_path: Path) -> None:
    """And all ranks ask for the same collectives in the same order, from the first capture on."""
    facts = small_model("llama-eight" if size == 8 else "llama").facts
    alone = computed(facts, ALONE)
    with running(facts, [repeated] * size, tmp_path) as ranks:
        first, *others = [answer(rank) for rank in ranks]
    for one, expected in zip(first[0], alone, strict=True):
        assert expected is not None
        assert relative_error(torch.from_numpy(one), expected.double()) < 1e-5
    for logits, asked, _ in others:
        assert logits == [None] * len(STEPS)
        assert asked == first[1]
    assert [kind for kind, _ in first[1]].count("columns") == 2 + len(STEPS), "two graphs, then the steps"
    assert {least for *_, least in (first, *others)} == {101 - size}


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies_in_a_capture_ends_the_others(size: int, small_model: Callable[..., Any], tmp_path: Path) -> None:
    """Long before a collective's deadline, those too that do not talk to it."""
    captures = [repeated, dies, *[repeated] * (size - 2)]
    with running(small_model("llama").facts, captures, tmp_path) as ranks:
        lost = [answer(each, DEADLINE_S / 2) for rank, each in enumerate(ranks) if rank != 1]
    assert [type(error) for error in lost] == [WorkerLostError] * (size - 1), lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_are_added_in_their_order_and_rounded_once(dtype: torch.dtype) -> None:
    parts = (torch.randn(5, 2500) * 100).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected += part.float()
    on_device = parts.to(DEVICE)
    add_parts(on_device, on_device[0]).run()
    assert torch.equal(on_device[0].cpu(), expected.to(dtype))
    assert torch.equal(on_device[1:].cpu(), parts[1:])
