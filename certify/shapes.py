"""The shapes of the models that are measured, and the least that a step of one needs."""

from __future__ import annotations

from dataclasses import replace

import torch

from certify.findings import Device
from configs.facts import Architecture, ModelFacts, WeightFormat

LLAMA_8B = ModelFacts(
    name="llama-8b-shape",
    architecture=Architecture.LLAMA,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_model_len=16_384,
    rope_theta=500_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001,),
    model_hash="random",
    weight_format=WeightFormat.SAFETENSORS,
    weight_files=(),
)
TINY = replace(
    LLAMA_8B,
    name="tiny-shape",
    num_layers=2,
    hidden_size=128,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=4096,
    max_model_len=2048,
    eos_token_ids=(1,),
)
"""A shape for processors, in rehearsals."""


def shape_for(device: Device) -> ModelFacts:
    """Return the shape that is measured on this device."""
    return LLAMA_8B if device == "cuda" else TINY


def dtype_for(device: Device) -> tuple[torch.dtype, str]:
    """Return the type of weights and activations that is measured on this device, and its name."""
    return (torch.bfloat16, "bfloat16") if device == "cuda" else (torch.float32, "float32")


def matrix_parameters(facts: ModelFacts) -> int:
    """Return the number of elements in the layers' matrices."""
    qkv = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim * facts.hidden_size
    output = facts.num_heads * facts.head_dim * facts.hidden_size
    return facts.num_layers * (qkv + output + 3 * facts.hidden_size * facts.intermediate_size)


def kv_bytes_per_token(facts: ModelFacts, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * dtype.itemsize


def fitting(facts: ModelFacts, dtype: torch.dtype, num_tokens: int, num_bytes: int) -> ModelFacts:
    """Return the shape with as many layers, at most its own, as fit into this memory with KV of `num_tokens` tokens.

    Raises ValueError if not even one layer fits.
    """
    ends = 2 * facts.vocab_size * facts.hidden_size * dtype.itemsize
    one = replace(facts, num_layers=1)
    layer = matrix_parameters(one) * dtype.itemsize + num_tokens * kv_bytes_per_token(one, dtype)
    num_layers = min(facts.num_layers, (num_bytes - ends) // layer)
    if num_layers < 1:
        raise ValueError(f"{num_bytes / 1e9:.0f} GB hold no layer of {facts.name} with {num_tokens} tokens")
    return replace(facts, num_layers=num_layers)
