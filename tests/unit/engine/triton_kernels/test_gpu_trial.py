"""What is compiled before a worker is ready is all that its steps launch: by what Triton compiles a kernel again for."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine import cuda_graphs
from engine.batch import Chunk, ForwardBatch
from engine.cuda_graphs import GRAPH_ROWS, GraphedDecoder, graph_rows
from engine.device_sampler import sample_on_device
from engine.gpu_trial import LargestStep, trial_steps
from engine.kernels.triton import launch
from engine.kernels.triton.product import GpuLinear
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.models import weights as weights_module
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.operators.triton_step import TritonStep
from protocol.sampling import SamplingParams

BLOCK_SIZE, BLOCKS = 8, 64
KERNELS = {"_decode_kernel", "_prefill_kernel", "_product_kernel", "_draw_kernel", "_plan_kernel"}
LARGEST = LargestStep(prompt_tokens=200, rows=5)


def key(one: launch.Launch) -> tuple[object, ...]:
    """What decides which binary a launch runs. Numbers that a kernel does not specialize count by their type alone."""
    names = one.kernel.arg_names
    loose = one.kernel.kwargs["do_not_specialize"] or ()  # as Triton's interpreter keeps it
    kinds: list[tuple[str, object]] = []
    for name, value in zip(names, one.args, strict=False):
        if isinstance(value, TensorDescriptor):
            kinds.append((str(value.base.dtype), tuple(value.block_shape)))
        elif isinstance(value, Tensor):
            kinds.append((str(value.dtype), value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in loose:
            kinds.append(("int", (value == 1, value % 16 == 0)))
        else:
            kinds.append((type(value).__name__, None))
    return (one.kernel.fn.__name__, tuple(kinds), tuple(sorted(one.constants.items())), one.num_warps, one.num_stages)


def repeated(compute: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
    """In place of a capture."""
    result = compute()
    return lambda: None, result


@pytest.mark.filterwarnings("ignore")  # of rows that hold whatever their memory held
@pytest.mark.skipif(torch.cuda.is_available(), reason="the weights of this test are on the CPU")
def test_serving_launches_nothing_that_was_not_compiled(
    small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = small_model("llama").facts
    seen: set[tuple[object, ...]] = set()
    monkeypatch.setattr(launch.Launch, "run", lambda one: seen.add(key(one)))
    monkeypatch.setattr(weights_module, "linear_for", lambda weight, bias, *, same_bits: GpuLinear(weight, bias))
    monkeypatch.setattr(cuda_graphs, "step_factory", lambda facts, library: partial(TritonStep.of, facts))
    with torch.inference_mode():
        weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
        pool = KVPool.for_model(facts, BLOCKS * BLOCK_SIZE, BLOCK_SIZE, torch.float32)
        decoder = GraphedDecoder(facts, weights, pool, repeated, graph_rows(LARGEST.rows))
        picks = zeros_for_picks(monkeypatch)
        runner = ModelRunner(facts, decoder.forward, sample_on_device, pool, "float32", "test")
        for step in trial_steps(LARGEST, facts.max_model_len, BLOCK_SIZE)[0]:
            runner.execute(step)
        compiled = set(seen)
        assert {name for name, *_ in compiled} >= KERNELS
        seen.clear()
        rng = random.Random(1)
        for _ in range(40):
            runner.execute(some_step(rng))
    assert picks
    assert seen
    assert seen - compiled == set()


def zeros_for_picks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is computed here, so that what would be sampled is any memory. Counts the steps that sample."""
    counted: list[int] = []
    empty = torch.empty

    def zeros(*shape: Any, **options: Any) -> Tensor:
        counted.append(1)
        return empty(*shape, **options).zero_()

    monkeypatch.setattr(torch, "empty", zeros)
    return counted


def some_step(rng: random.Random) -> list[Chunk]:
    """Prompts, their ends, and single tokens in any mixture, as a scheduler plans them."""
    chunks = []
    for _ in range(rng.randint(0, 3)):
        start, count = rng.choice([0, 8, 24]), rng.choice([rng.randint(1, 10), rng.randint(1, 60)])
        asked = rng.choice([None, SamplingParams(seed=1, max_tokens=9, temperature=rng.choice([0.0, 1.0]))])
        chunks.append(Chunk(tuple([1] * count), start, table(rng), asked, 0))
    for _ in range(rng.randint(0 if chunks else 1, LARGEST.rows)):
        asked = SamplingParams(seed=1, max_tokens=9, temperature=0.7, top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.5]))
        chunks.append(Chunk((1,), rng.randint(0, 90), table(rng), asked, 1))
    return chunks


def table(rng: random.Random) -> list[int]:
    return rng.sample(range(BLOCKS), 12)


def test_graphs_hold_the_largest_step() -> None:
    for rows in (1, 2, 3, 64, 65, 128, 129, 256, 512):
        sizes = graph_rows(rows)
        assert sizes[-1] >= rows
        assert len(sizes) == 1 or sizes[-2] < rows
    assert graph_rows(5000) == GRAPH_ROWS


def test_a_trial_is_as_large_as_a_step_may_be() -> None:
    (mixed, singles, alone, some), num_tokens = trial_steps(LargestStep(100, 7, sampled_tokens=9), 40, 16)
    batch = ForwardBatch.build(mixed, 16)
    assert len(batch.token_ids_T) == 40 + 7
    assert len(batch.sampled_chunks) == 8
    assert len(singles) == 9
    assert [len(alone), len(some[0].token_ids)] == [1, 17]
    assert len(trial_steps(LargestStep(100, 7, sampled_tokens=3), 40, 16)[0][1]) == 7
    assert sorted({int(slot) for slot in batch.slots_T}) == sorted(batch.slots_T.tolist())
    assert batch.slots_T.max() < num_tokens
