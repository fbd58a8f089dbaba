"""What a rank computes with, read from a model's files: named tensors, fused, and packed for the products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.facts import ModelFacts
from configs.facts import WeightFormat as FileFormat
from engine.kernels.quantized import GROUP, QuantizedWeight, quantize
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from engine.models.weight_source import WeightSource
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, QuantizedMatrix
from engine.native.packing import can_pack
from protocol.errors import ConfigError

Quantization = Literal["auto", "none", "int8", "int4"]

_CPU = torch.device("cpu")
_LAYER_BITS = {"int8": 8, "int4": 4}
"""Of what is quantized here. Embedding and output head keep eight bits where the layers have four, as in ggml's files."""


@dataclass(frozen=True)
class LoadedMatrix:
    """A weight [O, I] as it comes from the model's files."""

    dense: Callable[[], Tensor]
    """Reads it in full, which takes longer than all else and may not be needed."""
    quantized: QuantizedWeight | None
    """The same weight in four or eight bits; None if it is not to be used so."""


@dataclass(frozen=True)
class WeightFormat:
    """Format that the weight matrices are packed into."""

    dtype: torch.dtype
    quantization: Quantization
    """auto: as the file stores them. int8, int4: rounded to so many bits when they are loaded. none: no quantized copy."""
    library: NativeLibrary | None
    """The operators for `dtype`; torch's multiply without them."""
    device: torch.device = _CPU

    def pack(self, weight: LoadedMatrix) -> Tensor:
        """The weight as the products read it: as [O, I] without native operators, else as a matrix of `engine.native.matrix`
        packs it.
        """
        if self.library is None:
            return weight.dense().to(self.device, self.dtype)
        if weight.quantized is not None and can_pack(weight.quantized.values_OI):
            return QuantizedMatrix.pack(weight.quantized, self.library)
        return DenseMatrix.pack(weight.dense().to(self.dtype))


def packed_tensors(facts: ModelFacts, format_: WeightFormat, rank: int, size: int) -> Iterator[tuple[str, Tensor]]:
    """Read all parameters of one of `size` ranks, one after the other, under their names; those of layer i as `i.name`.

    Raises ConfigError naming a tensor that is missing, misshaped or unknown.
    """
    source = _open(facts)
    _check(facts, source)
    reader = _Reader(source, format_, rank, size)
    for parameter in model_parameters(facts):
        yield parameter.name, reader.packed(parameter, bits=8)
    for layer in range(facts.num_layers):
        for parameter in layer_parameters(facts, layer):
            yield f"{layer}.{parameter.name}", reader.packed(parameter, _LAYER_BITS.get(format_.quantization, 8))


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

    def packed(self, parameter: Parameter, bits: int) -> Tensor:
        """A parameter; a matrix packed, and in `bits` if it is quantized by us."""
        if not parameter.is_matrix:
            return self._tensor(parameter)
        return self.format_.pack(self._matrix(parameter, bits))

    def _matrix(self, weight: Parameter, bits: int) -> LoadedMatrix:
        wanted = self.format_.quantization
        if wanted in _LAYER_BITS and weight.shape[1] % GROUP == 0:
            rounded = quantize(self._read(weight, torch.float32), bits)
            # Every number of rows sees the same weights.
            return LoadedMatrix(lambda: rounded.dequantize(self.format_.dtype), rounded)
        stored = self._stored(weight) if wanted == "auto" and self.format_.library is not None else None
        return LoadedMatrix(lambda: self._tensor(weight), stored)

    def _tensor(self, parameter: Parameter) -> Tensor:
        return self._read(parameter, self.format_.dtype).to(self.format_.device)

    def _read(self, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        shards = parameter.shards(self.rank, self.size)
        fused = torch.empty(parameter.shard_shape(self.rank, self.size), dtype=dtype)
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
