"""Models for the engine's tests, and a small driver that generates with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from configs.arithmetic import ceil_div
from configs.facts import Architecture, ModelFacts, RopeScaling, WeightFormat
from configs.models import resolve
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
WIDE = SMALL | {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256}
"""Sizes that the native operators and products have, also on two ranks."""
LLAMA3_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)


@dataclass(frozen=True)
class SmallModel:
    """A random model in a Hugging Face directory, and transformers' own copy of it in float32."""

    facts: ModelFacts
    reference: Any


class Generate(Protocol):
    def __call__(
        self,
        runner: ModelRunner,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        chunk_tokens: int = ...,
        shuffle_blocks: bool = ...,
    ) -> list[list[SampledToken]]: ...


@pytest.fixture(scope="session")
def smollm2_facts() -> ModelFacts:
    return resolve("smollm2").facts


@pytest.fixture(scope="session")
def generate() -> Generate:
    return _generate


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SmallModel]]:
    """Makes `llama`, `llama-tied`, `llama-wide`, `llama3-rope`, `qwen2` and `qwen3` models, each once."""
    made: dict[str, SmallModel] = {}

    def make(kind: str) -> SmallModel:
        if kind not in made:
            made[kind] = _make_small_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    yield make
    made.clear()


def _make_small_model(kind: str, folder: Path) -> SmallModel:
    import transformers

    tied = kind in ("llama-tied", "qwen3")
    sizes = WIDE if kind == "llama-wide" else SMALL
    head_dim = {"qwen3": 32, "llama-wide": 64}.get(kind, 16)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if kind == "llama3-rope":
        rope |= {
            "rope_type": "llama3",
            "factor": LLAMA3_SCALING.factor,
            "low_freq_factor": LLAMA3_SCALING.low_freq_factor,
            "high_freq_factor": LLAMA3_SCALING.high_freq_factor,
            "original_max_position_embeddings": LLAMA3_SCALING.original_max_position,
        }
    family = {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(kind, "Llama")
    own_head_dim = {} if family == "Qwen2" else {"head_dim": head_dim}
    config = getattr(transformers, f"{family}Config")(**sizes, **own_head_dim, tie_word_embeddings=tied, rope_parameters=rope)
    torch.manual_seed(7)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Large enough that a wrong weight, order or scale changes the logits by far more than rounding does.
            spread = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + spread if "norm" in name else spread)
    reference.save_pretrained(folder)
    facts = ModelFacts(
        name=kind,
        architecture=Architecture(family.lower()),
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=head_dim,
        vocab_size=sizes["vocab_size"],
        max_model_len=sizes["max_position_embeddings"],
        rope_theta=10_000.0,
        rope_scaling=LLAMA3_SCALING if kind == "llama3-rope" else None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
        eos_token_ids=(0,),
        model_hash=kind,
        weight_format=WeightFormat.SAFETENSORS,
        weight_files=(folder / "model.safetensors",),
    )
    return SmallModel(facts, reference)


def _generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    chunk_tokens: int = 1_000_000,
    shuffle_blocks: bool = True,
) -> list[list[SampledToken]]:
    """`max_tokens` tokens for each prompt, all in one batch that shrinks as they finish."""
    block_size = runner.pool.block_size
    blocks = list(range(runner.pool.num_blocks))
    if shuffle_blocks:
        random.Random(3).shuffle(blocks)
    tables: list[list[int]] = []
    for prompt, params in zip(prompts, sampling, strict=True):
        needed = ceil_div(len(prompt) + params.max_tokens, block_size)
        tables.append([blocks.pop() for _ in range(needed)])
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    answers: list[list[SampledToken]] = [[] for _ in prompts]
    while running := [i for i, params in enumerate(sampling) if len(answers[i]) < params.max_tokens]:
        chunks = []
        for i in running:
            tokens = known[i][computed[i] : computed[i] + chunk_tokens]
            last = computed[i] + len(tokens) == len(known[i])
            chunks.append(Chunk(tokens, computed[i], tables[i], sampling[i] if last else None, len(answers[i])))
            computed[i] += len(tokens)
        for i, chunk, token in zip(running, chunks, runner.execute(chunks), strict=True):
            assert (token is None) == (chunk.sampling is None)
            if token is not None:
                answers[i].append(token)
                known[i].append(token.token_id)
    return answers
