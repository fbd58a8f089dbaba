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
from configs.facts import Architecture, DynamicScaling, LinearScaling, Llama3Scaling, ModelFacts, RopeScaling, YarnScaling
from configs.models import resolve
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams
from tests.tiny_models import random_model, saved, tiny_facts

WIDE = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256, "head_dim": 64}
"""Sizes that the native operators and products have, also on two ranks."""
EIGHT_HEADS = {"num_heads": 8, "num_kv_heads": 8}
"""So that eight ranks have one each."""
SCALINGS: dict[str, RopeScaling] = {
    "linear-rope": LinearScaling(4.0),
    "dynamic-rope": DynamicScaling(2.0, 64),
    "yarn-rope": YarnScaling(4.0, 64, attention_factor=1.14, beta_fast=16.0),
    "yarn-whole-rope": YarnScaling(8.0, 32, attention_factor=1.0, truncate=False),
    "llama3-rope": Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64),
}


WINDOWS = {"mistral": (24, 24, 24), "qwen3-window": (0, 40, 40)}
"""Models with sliding windows, by layer."""


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
    """Makes models, each once: `llama`, `llama-tied`, `llama-wide`, `llama-eight`, `qwen2`, `qwen3`, and those of SCALINGS and
    of WINDOWS."""
    made: dict[str, SmallModel] = {}

    def make(kind: str) -> SmallModel:
        if kind not in made:
            made[kind] = _make_small_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    yield make
    made.clear()


def _make_small_model(kind: str, folder: Path) -> SmallModel:
    families = {"qwen2": Architecture.QWEN2, "qwen3": Architecture.QWEN3, "qwen3-window": Architecture.QWEN3}
    family = families.get(kind, Architecture.LLAMA)
    sizes = {"llama-wide": WIDE, "llama-eight": EIGHT_HEADS, "qwen3": {"head_dim": 32}}.get(kind, {})
    facts = tiny_facts(
        kind,
        architecture=family,
        num_layers=3,
        rope_scaling=SCALINGS.get(kind),
        sliding_windows=WINDOWS.get(kind, ()),
        tie_word_embeddings=kind in ("llama-tied", "qwen3"),
        attention_bias=family is Architecture.QWEN2,
        qk_norm=family is Architecture.QWEN3,
        **sizes,
    )
    reference = random_model(facts, seed=7)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Large enough that a wrong weight, order or scale changes the logits by far more than rounding does.
            spread = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + spread if "norm" in name else spread)
    return SmallModel(saved(reference, facts, folder), reference)


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
