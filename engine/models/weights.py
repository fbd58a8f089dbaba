"""Builds a decoder's weights from a model's files, and says exactly what is wrong with files that don't fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.facts import ModelFacts
from configs.facts import WeightFormat as FileFormat
from engine.kernels.linear import Linear
from engine.kernels.quantized import GROUP, QuantizedWeight, quantize
from engine.kernels.rope import inverse_frequencies, stretch_llama3
from engine.models.decoder import DecoderWeights, Layer, Product
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from engine.models.weight_source import WeightSource
from engine.native.library import NativeLibrary, can_pack
from engine.native.matrix import DenseMatrix, Matrix, NativeLinear, QuantizedMatrix
from protocol.errors import ConfigError

Quantization = Literal["auto", "none", "int8", "int4"]

_CPU = torch.device("cpu")
_HEAD_BITS = 8
"""The output head keeps eight bits where the layers have four, as in ggml's files."""


@dataclass(frozen=True)
class LoadedMatrix:
    """A weight [O, I] as it comes from the model's files."""

    dense: Callable[[], Tensor]
    """Reads it in full, which takes longer than all else and may not be needed."""
    quantized: QuantizedWeight | None
    """The same weight in four or eight bits; None if it is not to be used so."""


@dataclass(frozen=True)
class WeightFormat:
    """What the matrices are turned into."""

    dtype: torch.dtype
    quantization: Quantization
    """auto: as the file stores them. int8, int4: rounded to so many bits when they are loaded. none: no quantized copy."""
    library: NativeLibrary | None
    """The operators for `dtype`; torch's multiply without them."""
    device: torch.device = _CPU

    def head(self, weight: LoadedMatrix) -> Callable[[Tensor], Tensor]:
        """The output head: float32 logits."""
        if self.library is not None:
            return self._matrix(weight, self.library).logits
        linear = self.linear(weight, None)
        return lambda x_SD: linear(x_SD).float()

    def linear(self, weight: LoadedMatrix, bias_O: Tensor | None) -> Product:
        """A product with a bias."""
        if self.library is not None:
            return NativeLinear(self._matrix(weight, self.library), bias_O)
        return Linear(weight.dense().to(self.device, self.dtype), bias_O, same_bits=self.dtype == torch.float32)

    def _matrix(self, weight: LoadedMatrix, library: NativeLibrary) -> Matrix:
        if weight.quantized is not None and can_pack(weight.quantized.values_OI):
            return QuantizedMatrix(weight.quantized, library)
        return DenseMatrix(weight.dense().to(self.dtype), library)


def load_weights(facts: ModelFacts, format_: WeightFormat, rank: int = 0, size: int = 1) -> DecoderWeights:
    """Read, convert, fuse and pack what one of `size` ranks holds of the model.

    Raises ConfigError naming a tensor that is missing, misshaped or unknown.
    """
    source = _open(facts)
    _check(facts, source)
    reader = _Reader(source, format_, rank, size)
    model = {p.name: p for p in model_parameters(facts)}
    layers = tuple(_layer({p.name: p for p in layer_parameters(facts, layer)}, reader) for layer in range(facts.num_layers))
    # Packing copies: the tied embedding is kept beside the head, because rows can't be looked up in a packed matrix.
    embedding_VD = reader.tensor(model["embedding"])
    head = format_.head(reader.matrix(model["embedding" if facts.tie_word_embeddings else "head"], _HEAD_BITS))
    return DecoderWeights(
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm=reader.tensor(model["final_norm"]),
        head=head,
        rope_frequencies=_rope_frequencies(facts).to(format_.device),
    )


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


@dataclass(frozen=True)
class _Reader:
    """One rank's shards from a model's files, parts stacked."""

    source: WeightSource
    format_: WeightFormat
    rank: int
    size: int

    def tensor(self, parameter: Parameter) -> Tensor:
        return self._read(parameter, self.format_.dtype).to(self.format_.device)

    def matrix(self, weight: Parameter, bits: int) -> LoadedMatrix:
        """A matrix, in `bits` if it is quantized by us."""
        wanted = self.format_.quantization
        if wanted in ("int8", "int4") and weight.shape[1] % GROUP == 0:
            rounded = quantize(self._read(weight, torch.float32), bits)
            # Every number of rows sees the same weights.
            return LoadedMatrix(lambda: rounded.dequantize(self.format_.dtype), rounded)
        stored = self._stored(weight) if wanted == "auto" and self.format_.library is not None else None
        return LoadedMatrix(lambda: self.tensor(weight), stored)

    def linear(self, weight: Parameter, bias: Parameter | None = None) -> Product:
        matrix = self.matrix(weight, 4 if self.format_.quantization == "int4" else 8)
        return self.format_.linear(matrix, None if bias is None else self.tensor(bias))

    def _read(self, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        shards = parameter.shards(self.rank, self.size)
        fused = torch.empty((sum(len(shard.rows) for shard in shards), *shards[0].shape[1:]), dtype=dtype)
        row = 0
        for shard in shards:
            self.source.read(shard, fused[row : row + len(shard.rows)])
            row += len(shard.rows)
        return fused

    def _stored(self, weight: Parameter) -> QuantizedWeight | None:
        """A matrix as the file has it; None if a part is not quantized, or not in as many bits as the others."""
        shards = weight.shards(self.rank, self.size)
        parts = [part for part in map(self.source.read_quantized, shards) if part is not None]
        return QuantizedWeight.stack(parts) if len(parts) == len(shards) and len({part.bits for part in parts}) == 1 else None


def _layer(parameters: Mapping[str, Parameter], reader: _Reader) -> Layer:
    def optional(name: str) -> Tensor | None:
        return reader.tensor(parameters[name]) if name in parameters else None

    return Layer(
        attention_norm=reader.tensor(parameters["attention_norm"]),
        qkv=reader.linear(parameters["qkv_weight"], parameters.get("qkv_bias")),
        q_norm=optional("q_norm"),
        k_norm=optional("k_norm"),
        output=reader.linear(parameters["output_weight"]),
        ffn_norm=reader.tensor(parameters["ffn_norm"]),
        gate_up=reader.linear(parameters["gate_up_weight"]),
        down=reader.linear(parameters["down_weight"]),
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
