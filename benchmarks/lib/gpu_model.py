"""Llama 8B's shape with random weights, in `transformers` and, from the same weights, in the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import Architecture, ModelFacts, WeightFormat
from engine.kernels.linear import Linear
from engine.kernels.rope import inverse_frequencies
from engine.models.decoder import DecoderWeights, Layer

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


def transformers_model(facts: ModelFacts, dtype: torch.dtype, device: torch.device) -> Any:
    """Make transformers' Llama of this shape, with the weights that it starts training with, and torch's attention operator."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        max_position_embeddings=facts.max_model_len,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": facts.rope_theta},
        tie_word_embeddings=False,
    )
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def decoder_weights(model: Any, facts: ModelFacts) -> DecoderWeights:
    """Make the engine's weights from transformers' model, as copies where parts are stacked."""

    def linear(*modules: Any) -> Linear:
        return Linear(torch.cat([module.weight.detach() for module in modules]), same_bits=False)

    def layer(block: Any) -> Layer:
        attention, network = block.self_attn, block.mlp
        return Layer(
            attention_norm=block.input_layernorm.weight.detach(),
            qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
            q_norm=None,
            k_norm=None,
            output=linear(attention.o_proj),
            ffn_norm=block.post_attention_layernorm.weight.detach(),
            gate_up=linear(network.gate_proj, network.up_proj),
            down=linear(network.down_proj),
        )

    embedding_VD: Tensor = model.model.embed_tokens.weight.detach()
    head = linear(model.lm_head)
    frequencies = inverse_frequencies(facts.head_dim, facts.rope_theta).to(embedding_VD.device)
    layers = tuple(layer(block) for block in model.model.layers)
    return DecoderWeights(
        embed=lambda ids_T: F.embedding(ids_T, embedding_VD),
        layers=layers,
        final_norm=model.model.norm.weight.detach(),
        head=lambda x_SD: head(x_SD).float(),
        rope_frequencies=frequencies,
    )


def matrix_parameters(facts: ModelFacts) -> int:
    """Return the number of elements in the layers' matrices."""
    qkv = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim * facts.hidden_size
    output = facts.num_heads * facts.head_dim * facts.hidden_size
    return facts.num_layers * (qkv + output + 3 * facts.hidden_size * facts.intermediate_size)


def kv_bytes_per_token(facts: ModelFacts, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    return facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * dtype.itemsize
