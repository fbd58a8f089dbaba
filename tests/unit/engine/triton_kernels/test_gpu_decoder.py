"""What surrounds the kernels on a GPU, run on a CPU: which graph serves which step, and the sampler's interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from certify.kernels.cases import DEVICE, relative_error
from engine.batch import Chunk, ForwardBatch
from engine.cuda_graphs import GraphedDecoder
from engine.device_sampler import sample_on_device
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.operators import step_factory
from engine.ranks.tensor_parallel import ALONE
from engine.sampler import SampleRequest, sample
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams

SAMPLED = SamplingParams(seed=0, max_tokens=1)


class Recorder:
    """Captures as a GPU does, but repeats the computation itself."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def __call__(self, compute: Callable[[], Tensor | None]) -> tuple[Callable[[], None], Tensor | None]:
        result = compute()

        def replay() -> None:
            again = compute()
            if result is not None and again is not None:
                self.replayed.append(len(result))
                result.copy_(again)

        return replay, result


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, of rows that hold whatever their memory held
@pytest.mark.skipif(torch.cuda.is_available(), reason="the weights of this test are on the CPU; tests/gpu captures real graphs")
def test_steps_go_to_the_smallest_graph_that_holds_them(small_model: Callable[[str], Any]) -> None:
    facts = replace(small_model("llama").facts, num_layers=3)
    recorder = Recorder()
    with torch.inference_mode():
        weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
        first, second = (KVPool.for_model(facts, 512, 8, torch.float32) for _ in range(2))
        first.data.zero_()
        second.data.zero_()
        graphed = GraphedDecoder(facts, weights, first, recorder, rows=(2, 1))
        plain = Decoder(facts, weights, step_factory(facts, None), ALONE)
        assert not first.data.any(), "capturing writes nothing"
        steps = [
            [Chunk(list(range(20)), 0, [4, 9, 2], SAMPLED, 0), Chunk([8, 7], 0, [5], None, 0)],
            [Chunk([3], 20, [4, 9, 2], SAMPLED, 1), Chunk([6], 2, [5], SAMPLED, 0)],
            [Chunk([1], 3, [5], SAMPLED, 1)],
            [Chunk([3], 21, [4, 9, 2], SAMPLED, 2), Chunk([6], 4, [5], None, 0)],
            [Chunk([i], 0, [20 + i], SAMPLED, 0) for i in range(3)],
            [Chunk([3 + i], 22 + i, [4, 9, 2, 7], SAMPLED, 3 + i) for i in range(2)],
        ]
        for chunks in steps:
            batch = ForwardBatch.build(chunks, 8)
            logits, expected = graphed.forward(batch, None), plain.forward(batch, second, None)
            assert logits is not None
            assert expected is not None
            assert relative_error(logits, expected.double()) < 1e-5
            assert torch.allclose(first.data, second.data, atol=1e-5)
    told = "prompts, steps that do not sample everywhere and large ones are launched one by one; a token and its draft are not"
    assert recorder.replayed == [2, 1, 2], told


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the weights of this test are on the CPU")
def test_a_windowed_context_may_have_more_blocks_than_the_pool(small_model: Callable[[str], Any]) -> None:
    """What lies before the windows is in no block, but in the table."""
    facts = replace(small_model("llama").facts, num_layers=3, sliding_windows=(8, 8, 8))
    recorder = Recorder()
    with torch.inference_mode():
        weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
        pool = KVPool.for_model(facts, 64, 8, torch.float32)
        pool.fill_randomly()
        graphed = GraphedDecoder(facts, weights, pool, recorder, rows=(2,))
        chunks = [Chunk([5], 157, [0] * 17 + [3, 1, 2], SAMPLED, 9), Chunk([6], 2, [5], SAMPLED, 1)]
        batch = ForwardBatch.build(chunks, 8)
        logits = graphed.forward(batch, None)
        expected = Decoder(facts, weights, step_factory(facts, None), ALONE).forward(batch, pool, None)
    assert logits is not None
    assert expected is not None
    assert relative_error(logits, expected.double()) < 1e-5
    assert recorder.replayed == [2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("device", "dtype", "field"), [("cuda", "auto", "device"), ("cpu", "float16", "dtype")])
def test_what_cannot_be_had_is_refused(device: Any, dtype: Any, field: str, small_model: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelRunner.load(small_model("llama").facts, dtype=dtype, block_size=8, num_kv_tokens=64, device=device)
    assert refused.value.param == field


def test_the_device_s_sampler_answers_like_the_other() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(5)) * 3
    best = int(logits[2].argmax())
    plain = SamplingParams(seed=2**63 - 1, max_tokens=9, num_logprobs=3)
    requests = [
        SampleRequest(plain, 5, 1),
        SampleRequest(replace(plain, temperature=0.0, num_logprobs=0), 6, 1),
        SampleRequest(replace(plain, temperature=0.0, min_tokens=4, stop_token_ids=(best, 7)), 7, 3),
        SampleRequest(replace(plain, temperature=0.0, min_tokens=4, stop_token_ids=(best, 7)), 7, 4),
        SampleRequest(replace(plain, top_k=3, min_p=0.2, choice=2, num_logprobs=None), 2**20, 0),
    ]
    before = logits.clone()
    assert sample_on_device(logits.to(DEVICE), requests) == sample(logits, requests)
    assert torch.equal(logits, before)
