"""A small random model whose layers all have a sliding window of 50 tokens, and what it says where everything is kept.

It has heads of 64, for which there are native operators. Of a stream 128 to 255 tokens before its newest one are kept, and 64
more (`configs.model_files.kv_window`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from engine.model_runner import ModelRunner
from tests.fault.alone import said_alone
from tests.fault.scenarios import Reference, prompt_of
from tests.tiny_models import random_model, saved, tiny_facts

WINDOW = 50
KEPT = 128 + 127 + 64
"""The most tokens behind a stream's newest one that it keeps."""
BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4
LONG = prompt_of(1000)


def windowed_model(folder: Path) -> ModelFacts:
    """Save a random two-layer Mistral in this folder."""
    facts = tiny_facts(
        "windowed",
        **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "vocab_size": 101, "max_model_len": 8192},
        rms_norm_eps=1e-6,
        sliding_windows=(WINDOW, WINDOW),
    )
    return saved(random_model(facts, seed=13), facts, folder)


def alone_of(facts: ModelFacts, **format: Any) -> Reference:
    """Greedy tokens of one worker that computes everything itself, and keeps it."""
    return said_alone(ModelRunner.load(facts, dtype="float32", block_size=8, num_kv_tokens=8192, **format))


def with_pools(config: ClusterConfig, prefill: int, decode: int, **more: Any) -> ClusterConfig:
    """The configuration with pools of so many tokens, and other values."""
    return config.model_copy(
        update={
            "prefill": config.prefill.model_copy(update={"kv_cache_tokens": prefill}),
            "decode": config.decode.model_copy(update={"kv_cache_tokens": decode}),
            **more,
        }
    )
