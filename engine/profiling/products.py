"""Which matrix products a model has, as the native operators multiply them: without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import ModelFacts, WeightFormat
from configs.model_files.gguf_file import read_gguf_index
from engine.kernels.quantized import GROUP
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.native.library import NativeLibrary
from engine.native.packing import COLUMNS, OUTPUT_MULTIPLE

HEAD = "head"
_STORED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types of tensors that are used as they are stored."""


@dataclass(frozen=True)
class Product:
    """Rows [T, inputs] times a weight of `bits` bits, to [T, outputs]."""

    name: str
    bits: int
    """4 or 8 where the weight is quantized, else those of the dtype."""
    inputs: int
    outputs: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, with its scales and minimums where it is quantized."""
        per_group = GROUP * self.bits // 8 + (0 if self.bits > _MOST_QUANTIZED else 4)
        return self.outputs * self.inputs // GROUP * per_group

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return a made-up weight in the form that the native operators read. All of its numbers are ordinary ones."""
        if self.bits > _MOST_QUANTIZED:
            return torch.ones(self.outputs * self.inputs, dtype=dtype)
        return torch.full((self.weight_bytes,), 0x3C, dtype=torch.uint8)  # two such bytes are 1.06 in float16

    def multiply(self, library: NativeLibrary, x_TI: Tensor, weight: Tensor) -> Tensor:
        """Return the product with such a weight. The head's is float32."""
        dtype = torch.float32 if self.name == HEAD else library.dtype
        if self.bits > _MOST_QUANTIZED:
            return library.dense_product(x_TI, weight, self.outputs, dtype)
        return library.quantized_product(x_TI, weight, self.outputs, self.bits, dtype)


_MOST_QUANTIZED = 8


def products_of(facts: ModelFacts, dtype: torch.dtype, quantization: str, ranks: int) -> list[Product]:
    """Return the products of a layer, then the head's, of the first of so many ranks of a model.

    `quantization` is the option of the configuration. Layers are taken to be like the first one.
    """
    stored = _stored_bits(facts) if quantization == "auto" else {}
    layer = {parameter.name: parameter for parameter in layer_parameters(facts, 0)}
    weights = {name: layer[f"{name}_weight"] for name in ("qkv", "output", "gate_up", "down")}
    model = {parameter.name: parameter for parameter in model_parameters(facts)}
    weights[HEAD] = model["embedding" if facts.tie_word_embeddings else "head"]
    return [_product(name, weight, dtype, quantization, stored, ranks) for name, weight in weights.items()]


def _product(
    name: str, weight: Parameter, dtype: torch.dtype, quantization: str, stored: Mapping[str, int], ranks: int
) -> Product:
    shards = weight.shards(0, ranks)
    outputs, inputs = sum(shard.shape[0] for shard in shards), shards[0].shape[1]
    bits = {stored.get(part.name) for part in weight.parts}
    if quantization in ("int8", "int4"):
        bits = {4 if quantization == "int4" and name != HEAD else 8}
    (quantized,) = bits if len(bits) == 1 else (None,)
    if quantized is not None and inputs % GROUP == 0 and outputs % OUTPUT_MULTIPLE == 0:
        return Product(name, quantized, inputs, outputs)
    padded_inputs, padded_outputs = (ceil_div(size, unit) * unit for size, unit in ((inputs, GROUP), (outputs, COLUMNS)))
    return Product(name, 8 * dtype.itemsize, padded_inputs, padded_outputs)


def _stored_bits(facts: ModelFacts) -> dict[str, int]:
    """Bits of the tensors that a file holds quantized, by name."""
    if facts.weight_format is not WeightFormat.GGUF:
        return {}
    tensors = [tensor for file in facts.weight_files for tensor in read_gguf_index(file).tensors.values()]
    return {tensor.name: _STORED_BITS[tensor.type_name] for tensor in tensors if tensor.type_name in _STORED_BITS}
