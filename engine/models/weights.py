"""A decoder's weights: made from the tensors of `engine.models.packing`, which several processes may share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import ModelFacts
from configs.models import is_unchanged
from engine.kernels.linear import Linear, linear_for
from engine.kernels.rope import rope_frequencies
from engine.models.decoder import DecoderWeights, Layer, Product
from engine.models.packing import WeightFormat, packed_tensors
from engine.models.parameters import Parameter, layer_parameters, model_parameters
from engine.models.weight_file import mapped_tensors
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, Matrix, NativeLinear, QuantizedMatrix

if TYPE_CHECKING:
    from engine.kernels.triton.product import GpuLinear


def load_weights(
    facts: ModelFacts, format_: WeightFormat, rank: int = 0, size: int = 1, *, shared: bool = False
) -> DecoderWeights:
    """Return what one of `size` ranks holds of the model: read, converted, fused and packed.

    `shared` weights lie in a file of the cache folder that all processes map (`engine.models.weight_file`), if they are packed
    for native operators. Raises ConfigError naming a tensor that is missing, misshaped or unknown.
    """
    if shared and format_.library is not None:
        by_output = format_.library.records_by_output
        identity = (facts.model_hash, str(format_.dtype), format_.quantization, by_output, rank, size)
        pack = partial(packed_tensors, facts, format_, rank, size)
        tensors = mapped_tensors(facts.name, identity, pack, partial(is_unchanged, facts))
    else:
        tensors = dict(packed_tensors(facts, format_, rank, size))
    return _Assembly(facts, tensors, format_, rank, size).weights()


@dataclass(frozen=True)
class _Assembly:
    """Makes one rank's operators from its tensors."""

    facts: ModelFacts
    tensors: dict[str, Tensor]
    format_: WeightFormat
    rank: int
    size: int

    def weights(self) -> DecoderWeights:
        parameters = {p.name: p for p in model_parameters(self.facts)}
        embedding = parameters["embedding"]
        head = parameters.get("head", embedding)
        frequencies = rope_frequencies(self.facts).to(self.format_.device)
        layers = tuple(self._layer(index) for index in range(self.facts.num_layers))
        if self.format_.library is not None:
            embed = self._matrix("embedding", embedding, self.format_.library).embedding
            logits = self._matrix(head.name, head, self.format_.library).logits
            return DecoderWeights(embed, layers, self.tensors["final_norm"], logits, frequencies)
        logits, embedding_VD = self._dense(head.name, None).logits, self.tensors["embedding"]
        return DecoderWeights(
            embed=lambda ids_T: F.embedding(ids_T, embedding_VD),
            layers=layers,
            final_norm=self.tensors["final_norm"],
            head=logits,
            rope_frequencies=frequencies,
        )

    def _layer(self, index: int) -> Layer:
        parameters = {p.name: p for p in layer_parameters(self.facts, index)}

        def tensor(name: str) -> Tensor:
            return self.tensors[f"{index}.{name}"]

        def optional(name: str) -> Tensor | None:
            return tensor(name) if name in parameters else None

        def linear(name: str, bias: Tensor | None = None) -> Product:
            return self._linear(f"{index}.{name}", parameters[name], bias)

        return Layer(
            attention_norm=tensor("attention_norm"),
            qkv=linear("qkv_weight", optional("qkv_bias")),
            q_norm=optional("q_norm"),
            k_norm=optional("k_norm"),
            output=linear("output_weight"),
            ffn_norm=tensor("ffn_norm"),
            gate_up=linear("gate_up_weight"),
            down=linear("down_weight"),
        )

    def _linear(self, name: str, parameter: Parameter, bias_O: Tensor | None) -> Product:
        if self.format_.library is not None:
            return NativeLinear(self._matrix(name, parameter, self.format_.library), bias_O, self.format_.library)
        return self._dense(name, bias_O)

    def _dense(self, name: str, bias_O: Tensor | None) -> Linear | GpuLinear:
        # Which holds a copy. The lookup needs the head's own, if they are tied.
        weight_OI = self.tensors[name] if name == "embedding" else self.tensors.pop(name)
        return linear_for(weight_OI, bias_O, same_bits=self.format_.dtype == torch.float32)

    def _matrix(self, name: str, parameter: Parameter, library: NativeLibrary) -> Matrix:
        packed = self.tensors[name]
        if packed.dtype == torch.uint8:
            return QuantizedMatrix(packed, library)
        outputs, inputs = parameter.shard_shape(self.rank, self.size)
        return DenseMatrix(packed, outputs, inputs, library)
