"""The default model against transformers on the same weights."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks import quality
from benchmarks.lib.load import PROSE
from configs.facts import ModelFacts, WeightFormat
from configs.model_files.rope import with_overrides
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.models.packing import Quantization
from protocol.sampling import SamplingParams
from router.text.tokenizer import Tokenizer
from tests.cases import slow
from tests.tiny_models import saved

FRANCE = [504, 3575, 282, 4649, 314]  # The capital of France is
PARIS = 7042
CODE = [1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 2067, 216, 34, 42, 448, 1003, 304, 198]  # def fibonacci(n): ...
LONG = [(7 * i * i + 13 * i) % 49_000 + 17 for i in range(400)]
NUM_TOKENS = 12


def greedy(num_logprobs: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=num_logprobs)


@pytest.mark.slow
def test_float32_equals_transformers(smollm2_facts: ModelFacts, transformers_smollm2: Any, generate: Any) -> None:
    runner = ModelRunner.load(smollm2_facts, dtype="float32", block_size=16, num_kv_tokens=8192)
    prompts = [FRANCE, CODE, LONG]
    answers = generate(runner, prompts, [greedy(5)] * 3, chunk_tokens=256)
    assert answers[0][0].token_id == PARIS
    for token_ids, answer in zip(prompts, answers, strict=True):
        generated = [token.token_id for token in answer]
        with torch.no_grad():
            logits = transformers_smollm2(torch.tensor([token_ids + generated]), logits_to_keep=NUM_TOKENS + 1).logits[0]
        expected = torch.log_softmax(logits, dim=-1)
        for row, token in zip(expected, answer, strict=False):
            assert token.token_id == int(row.argmax())
            assert token.logprobs is not None
            assert token.logprobs.chosen == pytest.approx(row[token.token_id].item(), abs=1e-3)
            for entry in token.logprobs.top:
                assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
LAYERS = 30 if os.environ.get("TANDEM_THOROUGH") else 3
"""The first of 30, and all of them with TANDEM_THOROUGH: positions are turned in the same way in each."""
CHECKED = (100, 4095, 8191, 8192, 12_000, 16_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twice_the_first_context_by_yarn_equals_transformers(
    smollm2_facts: ModelFacts, transformers_smollm2: Any, tmp_path: Path
) -> None:
    """At positions below, at and far beyond the model's own context, of a prompt of 16k tokens in chunks."""
    facts = with_overrides(smollm2_facts, {"rope_parameters": YARN}, None)
    assert facts.max_model_len == 16_384
    reference = copy.deepcopy(transformers_smollm2)
    reference.config.rope_parameters = YARN | {"rope_theta": facts.rope_theta}
    reference.config.num_hidden_layers = LAYERS
    reference.model.rotary_emb = LlamaRotaryEmbedding(reference.config)
    reference.model.layers = reference.model.layers[:LAYERS]
    facts = saved(reference, replace(facts, num_layers=LAYERS, weight_format=WeightFormat.SAFETENSORS), tmp_path)
    text = Tokenizer.build(resolve("smollm2").tokenizer).encode(PROSE.read_text())
    token_ids = (text * (1 + CHECKED[-1] // len(text)))[: CHECKED[-1] + 1]
    with torch.inference_mode():
        logits = reference(torch.tensor([token_ids]), logits_to_keep=torch.tensor(CHECKED), use_cache=False).logits[0]
    expected = torch.log_softmax(logits, dim=-1)
    runner = ModelRunner.load(facts, dtype="float32", block_size=16, num_kv_tokens=16_384)
    table = list(reversed(range(1024)))
    start, found = 0, []
    for end in sorted({*range(512, len(token_ids), 512), *(position + 1 for position in CHECKED)}):
        sampling = greedy(5) if end - 1 in CHECKED else None
        found += runner.execute([Chunk(token_ids[start:end], start, table, sampling, 0)])
        start = end
    for row, token in zip(expected, (token for token in found if token is not None), strict=True):
        assert token.token_id == int(row.argmax())
        assert token.logprobs is not None
        for entry in token.logprobs.top:
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=2e-3)


@pytest.mark.parametrize("quantization", [*slow(["auto"]), "none", "int8", "int4"])
def test_bfloat16_is_close(
    smollm2_facts: ModelFacts, transformers_smollm2: Any, generate: Any, quantization: Quantization
) -> None:
    runner = ModelRunner.load(smollm2_facts, dtype="bfloat16", block_size=16, num_kv_tokens=2048, quantization=quantization)
    for token_ids in (FRANCE, CODE, LONG[:200]):
        token = generate(runner, [token_ids], [greedy(20)])[0][0]
        with torch.no_grad():
            expected = torch.log_softmax(
                transformers_smollm2(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1], dim=-1
            )
        gaps = [abs(entry.logprob - expected[entry.token_id].item()) for entry in token.logprobs.top]
        assert sum(gaps) / len(gaps) < 0.1
        assert max(gaps) < 0.4


@pytest.mark.slow
def test_no_format_costs_a_percent_of_perplexity() -> None:
    """On the beginning of the text that `benchmarks.quality` reads whole."""
    model = resolve("smollm2")
    token_ids = Tokenizer.build(model.tokenizer).encode(PROSE.read_text())[:256]
    with torch.inference_mode():
        reference = quality.logprobs(model, token_ids, *quality.WAYS["float32"])
        for name, way in quality.WAYS.items():
            figures = quality.compare(quality.logprobs(model, token_ids, *way), reference, token_ids)
            exact = quality.compare(reference, reference, token_ids)
            assert figures["perplexity"] == pytest.approx(exact["perplexity"], rel=0.01), name
            assert figures["mean_logprob_distance"] < 0.06, name
