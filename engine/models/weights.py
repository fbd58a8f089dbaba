"""Builds a decoder's weights from a model's files, and says exactly what is wrong with files that don't fit."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.facts import ModelFacts, WeightFormat
from engine.kernels.int4 import Int4Weight
from engine.kernels.linear import Linear
from engine.kernels.rope import inverse_frequencies, stretch_llama3
from engine.models.decoder import DecoderWeights, Layer
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from engine.models.weight_source import WeightSource
from protocol.errors import ConfigError


def load_weights(facts: ModelFacts, dtype: torch.dtype) -> DecoderWeights:
    """Read, convert to `dtype`, fuse and pack. Raises ConfigError naming a tensor that is missing, misshaped or unknown."""
    source = _open(facts)
    _check(facts, source)
    model = {p.name: _build(p, source, dtype) for p in model_parameters(facts)}
    layers = tuple(_layer(facts, layer, source, dtype) for layer in range(facts.num_layers))
    embedding_VD = model["embedding"]
    # Packing copies: the tied embedding is kept beside the head, because rows can't be looked up in a packed matrix.
    head = Linear(model["head"] if not facts.tie_word_embeddings else embedding_VD)
    return DecoderWeights(embedding_VD, layers, model["final_norm"], head, _rope_frequencies(facts))


def _open(facts: ModelFacts) -> WeightSource:
    if facts.weight_format is WeightFormat.GGUF:
        return GgufWeights(facts.weight_files, facts.architecture)
    return SafetensorsWeights(facts.weight_files, tied_head=facts.tie_word_embeddings)


def _check(facts: ModelFacts, source: WeightSource) -> None:
    """Compare the whole table with the files before anything is read."""
    layers = (layer_parameters(facts, layer) for layer in range(facts.num_layers))
    parameters = [*model_parameters(facts), *(p for layer in layers for p in layer)]
    expected = {part.name: part.shape for p in parameters for part in p.parts}
    for name in expected:
        if name not in source.shapes:
            raise ConfigError(f"{facts.name}: tensor {source.stored_name(name)} is missing", param="model")
    for name, shape in source.shapes.items():
        stored = source.stored_name(name)
        if name not in expected:
            raise ConfigError(
                f"{facts.name}: tensor {stored} has no place in a {facts.architecture.value} model of "
                f"{facts.num_layers} layers",
                param="model",
            )
        if shape != expected[name]:
            raise ConfigError(
                f"{facts.name}: tensor {stored} is {list(shape)} and should be {list(expected[name])}",
                param="model",
            )


def _build(parameter: Parameter, source: WeightSource, dtype: torch.dtype) -> Tensor:
    fused = torch.empty(parameter.shape, dtype=dtype)
    row = 0
    for part in parameter.parts:
        source.read(part, fused[row : row + part.shape[0]])
        row += part.shape[0]
    return fused


def _build_int4(parameter: Parameter, source: WeightSource) -> Int4Weight | None:
    parts = [source.read_int4(part) for part in parameter.parts]
    stored = [part for part in parts if part is not None]
    return Int4Weight.stack(stored) if len(stored) == len(parts) else None


def _layer(facts: ModelFacts, layer: int, source: WeightSource, dtype: torch.dtype) -> Layer:
    parameters = {p.name: p for p in layer_parameters(facts, layer)}
    tensors = {name: _build(parameter, source, dtype) for name, parameter in parameters.items()}

    def linear(weight: str, bias: str | None = None) -> Linear:
        int4 = _build_int4(parameters[weight], source) if dtype == torch.bfloat16 else None
        return Linear(tensors[weight], tensors.get(bias) if bias else None, int4)

    return Layer(
        attention_norm=tensors["attention_norm"],
        qkv=linear("qkv_weight", "qkv_bias"),
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
        output=linear("output_weight"),
        ffn_norm=tensors["ffn_norm"],
        gate_up=linear("gate_up_weight"),
        down=linear("down_weight"),
    )


def _rope_frequencies(facts: ModelFacts) -> Tensor:
    frequencies = inverse_frequencies(facts.head_dim, facts.rope_theta)
    scaling = facts.rope_scaling
    if scaling is None:
        return frequencies
    return stretch_llama3(
        frequencies,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position=scaling.original_max_position,
    )
