"""Builds a decoder's weights from a model's files, and says exactly what is wrong with files that don't fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.facts import ModelFacts
from configs.facts import WeightFormat as FileFormat
from engine.kernels.linear import Linear
from engine.kernels.quantized import GROUP, QuantizedWeight, quantize
from engine.kernels.rope import inverse_frequencies, stretch_llama3
from engine.models.decoder import DecoderWeights, Layer
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from engine.models.weight_source import WeightSource
from engine.native.library import NativeLibrary, can_pack
from engine.native.matrix import NativeHead, QuantizedMatrix
from protocol.errors import ConfigError

Quantization = Literal["auto", "none", "int8", "int4"]

_HEAD_BITS = 8
"""The output head keeps eight bits where the layers have four, as in ggml's files."""


@dataclass(frozen=True)
class WeightFormat:
    """What the matrices are turned into."""

    dtype: torch.dtype
    quantization: Quantization
    """auto: as the file stores them. int8, int4: rounded to so many bits when they are loaded. none: no quantized copy."""
    deterministic: bool
    """A row's result may not depend on the number of rows."""
    library: NativeLibrary | None

    @property
    def uses_quantized(self) -> bool:
        """Whether anything multiplies quantized weights."""
        return self.dtype == torch.bfloat16 and self.library is not None and not self.deterministic

    def head(self, dense_VD: Tensor, quantized: QuantizedWeight | None) -> Callable[[Tensor], Tensor]:
        """The output head: float32 logits."""
        if self.dtype == torch.bfloat16 and self.library is not None and NativeHead.fits(dense_VD):
            return NativeHead(dense_VD.to(self.dtype), self._few_rows(quantized), self.library)
        linear = self.linear(dense_VD, None, None)
        return lambda x_SD: linear(x_SD).float()

    def linear(self, dense_OI: Tensor, bias_O: Tensor | None, quantized: QuantizedWeight | None) -> Linear:
        same_bits = self.deterministic or self.dtype == torch.float32
        return Linear(dense_OI.to(self.dtype), bias_O, self._few_rows(quantized), same_bits=same_bits)

    def _few_rows(self, quantized: QuantizedWeight | None) -> QuantizedMatrix | None:
        if quantized is None or self.library is None or not self.uses_quantized:
            return None
        return QuantizedMatrix(quantized, self.library) if can_pack(quantized.values_OI) else None


def load_weights(facts: ModelFacts, format_: WeightFormat) -> DecoderWeights:
    """Read, convert, fuse and pack. Raises ConfigError naming a tensor that is missing, misshaped or unknown."""
    source = _open(facts)
    _check(facts, source)
    model = {p.name: p for p in model_parameters(facts)}
    layers = tuple(_layer(facts, layer, source, format_) for layer in range(facts.num_layers))
    # Packing copies: the tied embedding is kept beside the head, because rows can't be looked up in a packed matrix.
    embedding_VD = _read(model["embedding"], source, format_.dtype)
    head = format_.head(*_matrix(model["embedding" if facts.tie_word_embeddings else "head"], source, format_, _HEAD_BITS))
    final_norm = _read(model["final_norm"], source, format_.dtype)
    return DecoderWeights(embedding_VD, layers, final_norm, head, _rope_frequencies(facts))


def _open(facts: ModelFacts) -> WeightSource:
    if facts.weight_format is FileFormat.GGUF:
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


def _read(parameter: Parameter, source: WeightSource, dtype: torch.dtype) -> Tensor:
    fused = torch.empty(parameter.shape, dtype=dtype)
    row = 0
    for part in parameter.parts:
        source.read(part, fused[row : row + part.shape[0]])
        row += part.shape[0]
    return fused


def _matrix(weight: Parameter, source: WeightSource, format_: WeightFormat, bits: int) -> tuple[Tensor, QuantizedWeight | None]:
    """A matrix in full, and in few bits (in `bits` if it is quantized by us) if it is to be used so."""
    if format_.quantization in ("int8", "int4") and weight.shape[1] % GROUP == 0:
        rounded = quantize(_read(weight, source, torch.float32), bits)
        return rounded.dequantize(format_.dtype), rounded  # every number of rows sees the same weights
    stored = _stored(weight, source) if format_.quantization == "auto" and format_.uses_quantized else None
    return _read(weight, source, format_.dtype), stored


def _stored(weight: Parameter, source: WeightSource) -> QuantizedWeight | None:
    """A matrix as the file has it; None if a part is not quantized, or not in as many bits as the others."""
    parts = [part for part in map(source.read_quantized, weight.parts) if part is not None]
    return QuantizedWeight.stack(parts) if len(parts) == len(weight.parts) and len({part.bits for part in parts}) == 1 else None


def _linear(weight: Parameter, bias_O: Tensor | None, source: WeightSource, format_: WeightFormat) -> Linear:
    dense_OI, quantized = _matrix(weight, source, format_, 4 if format_.quantization == "int4" else 8)
    return format_.linear(dense_OI, bias_O, quantized)


def _layer(facts: ModelFacts, layer: int, source: WeightSource, format_: WeightFormat) -> Layer:
    parameters = {p.name: p for p in layer_parameters(facts, layer)}

    def vector(name: str) -> Tensor | None:
        return _read(parameters[name], source, format_.dtype) if name in parameters else None

    def norm(name: str) -> Tensor:
        return _read(parameters[name], source, format_.dtype)

    return Layer(
        attention_norm=norm("attention_norm"),
        qkv=_linear(parameters["qkv_weight"], vector("qkv_bias"), source, format_),
        q_norm=vector("q_norm"),
        k_norm=vector("k_norm"),
        output=_linear(parameters["output_weight"], None, source, format_),
        ffn_norm=norm("ffn_norm"),
        gate_up=_linear(parameters["gate_up_weight"], None, source, format_),
        down=_linear(parameters["down_weight"], None, source, format_),
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
