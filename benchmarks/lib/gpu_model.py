"""A model with random weights in `transformers` and, from the same weights, in the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import ModelFacts
from engine.kernels.linear import linear_for
from engine.kernels.rope import inverse_frequencies
from engine.models.decoder import DecoderWeights, Layer, Product


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
    """Make the engine's weights from transformers' model. Both use the same memory: two copies would not fit into 80 GB."""

    def linear(*modules: Any) -> Product:
        stacked = torch.cat([module.weight.detach() for module in modules])
        for module, part in zip(modules, stacked.split([len(module.weight) for module in modules]), strict=True):
            module.weight.data = part
        return linear_for(stacked, same_bits=False)

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
    head = linear_for(model.lm_head.weight.detach(), same_bits=False)
    frequencies = inverse_frequencies(facts.head_dim, facts.rope_theta).to(embedding_VD.device)
    layers = tuple(layer(block) for block in model.model.layers)
    return DecoderWeights(
        embed=lambda ids_T: F.embedding(ids_T, embedding_VD),
        layers=layers,
        final_norm=model.model.norm.weight.detach(),
        head=head.logits,
        rope_frequencies=frequencies,
    )
