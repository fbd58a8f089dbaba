"""What `benchmarks/gpu.py` compares with transformers is the same model; its table has a line for everything."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu import table
from benchmarks.lib.gpu_model import decoder_weights, transformers_model
from benchmarks.lib.gpu_steps import StepTiming, same_tokens
from certify.ceilings import Ceilings
from certify.kernels.times import Timing
from certify.shapes import LLAMA_8B
from certify.step_times import token_ids
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.operators import step_factory
from engine.ranks.tensor_parallel import ALONE
from engine.sampler import sample

SMALL = replace(
    LLAMA_8B, num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=40_000
)


def test_transformers_has_the_same_weights() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        peer = transformers_model(SMALL, torch.float32, torch.device("cpu"))
        pool = KVPool.for_model(SMALL, 1024, 16, torch.float32)
        decoder = Decoder(SMALL, decoder_weights(peer, SMALL), step_factory(SMALL, None), ALONE)
        runner = ModelRunner(
            SMALL, lambda batch, on_layer: decoder.forward(batch, pool, on_layer), sample, pool, "float32", "torch float32 none"
        )
        prompts = [token_ids(length) for length in (1, 17, 200)]
        assert same_tokens(runner, peer, prompts, steps=8) == "24 of 24 greedy tokens are transformers' best"
        peer.model.layers[1].mlp.up_proj.weight.neg_()
        assert not same_tokens(runner, peer, prompts, steps=8).startswith("24")


def test_the_table_has_every_line() -> None:
    best = Ceilings(4e12, 8e14)
    kernels = [Timing("one", 1e-3, 2e9, 2e11, 2e-3), Timing("other", 1e-3, 2e9, 0, None)]
    steps = [StepTiming("prefill", 2048, 0.1, None, 8e9, 4e13)]
    lines = table({"gpu": "some"}, best, {"tests": "all"}, kernels, steps).splitlines()
    assert "| one | 1.000 | 50% | 25% | 2.000 |" in lines
    assert "| other | 1.000 | 50% | 0% |  |" in lines
    assert "| prefill | 100.0 | 20,480 | 2% | 50% |  |" in lines
