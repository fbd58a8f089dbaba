"""One dense decoder for Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary grouped-query attention, SwiGLU.

The families differ in flags of `ModelFacts`: biases on q, k and v (Qwen2), a norm on each head of q and k (Qwen3),
stretched rotary frequencies (Llama 3.1), an output head of its own or tied to the embedding.

On a rank of a tensor-parallel worker all widths but the hidden size are its share: the model is the same, and what attention,
feed-forward network and embedding give is added up over the ranks.

Shape suffixes as in `engine.kernels`; D is the hidden size, S the rows that are sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.facts import ModelFacts
from configs.sharding import vocabulary_of
from engine.batch import ForwardBatch
from engine.kernels.pinned import sent
from engine.memory.kv_pool import KVPool
from engine.operators import Step, StepFactory
from engine.ranks.tensor_parallel import TensorParallel

Product = Callable[[Tensor], Tensor]
"""[T, I] to [T, O], in the weights' dtype."""


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Product
    ffn_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class DecoderWeights:
    embed: Callable[[Tensor], Tensor]
    """Token ids [T], counted from this rank's first, to their embeddings [T, D]."""
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Callable[[Tensor], Tensor]
    """[S, D] to float32 logits of this rank's tokens, [S, V]."""
    rope_frequencies: Tensor
    """Rotary frequencies [H/2] in float32, with the model's scaling included."""


class Decoder:
    """The model on one rank. Holds weights, no state."""

    def __init__(self, facts: ModelFacts, weights: DecoderWeights, begin_step: StepFactory, ranks: TensorParallel) -> None:
        """`facts` are those of one rank: `configs.sharding.rank_facts`."""
        self._facts = facts
        self._weights = weights
        self._begin_step = begin_step
        self._ranks = ranks
        self._vocabulary = [vocabulary_of(rank, ranks.size, facts.vocab_size) for rank in range(ranks.size)]

    def forward(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None) -> Tensor | None:
        """Compute the batch, write its KV to the pool; float32 logits [S, V] of the whole vocabulary.

        None if no row is sampled from, and on every rank but the first.
        `on_layer(i)` is called as soon as layer i's KV of the whole batch is in the pool. After the last layer's KV only the
        rows that are sampled from are computed any further.
        """
        step = self._begin_step(batch, pool, self._weights.rope_frequencies)
        normed_SD = self.layers(step, self.embed(step.token_ids_T), batch, pool, on_layer)
        return None if normed_SD is None else self.logits(normed_SD)

    def layers(
        self, step: Step, x_TD: Tensor, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None
    ) -> Tensor | None:
        """From embeddings, which are added to in place, to the normed rows that are sampled from, [S, D], if there are any.

        The sum over all layers is kept in float32: what is rounded away in one layer is missing in all later ones.
        """
        layers, eps, add_up = self._weights.layers, self._facts.rms_norm_eps, self._ranks.sum
        norms = [*(layer.attention_norm for layer in layers[1:]), self._weights.final_norm]
        normed_TD = step.add_norm(x_TD, None, layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            qkv_TA = layer.qkv(normed_TD)
            if layer.q_norm is not None and layer.k_norm is not None:
                step.norm_heads(qkv_TA, layer.q_norm, layer.k_norm, eps)
            step.store(index, qkv_TA)
            if on_layer is not None:
                on_layer(index)
            if index == len(layers) - 1:
                if not batch.sampled_chunks:
                    return None
                if not batch.only_decodes:
                    rows_S = sent(batch.sample_rows_S, x_TD.device)
                    x_TD, qkv_TA = x_TD[rows_S], qkv_TA[rows_S]
                    step = self._begin_step(batch.sampled_rows(), pool, self._weights.rope_frequencies)
            attended_TD = add_up(layer.output(step.attend(index, qkv_TA)))
            normed_TD = step.add_norm(x_TD, attended_TD, layer.ffn_norm, eps)
            fed_TD = add_up(layer.down(step.swiglu(layer.gate_up(normed_TD))))
            normed_TD = step.add_norm(x_TD, fed_TD, next_norm, eps)
        return normed_TD

    def logits(self, normed_SD: Tensor) -> Tensor | None:
        """Float32 logits of the whole vocabulary, [S, V]; None on every rank but the first."""
        return self._ranks.columns(self._weights.head(normed_SD), [len(tokens) for tokens in self._vocabulary])

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, D] in float32. Each token is known to one rank, so the sum over the ranks is exact."""
        if self._ranks.size == 1:
            return self._weights.embed(token_ids_T).float()
        own = self._vocabulary[self._ranks.rank]
        others_T = (token_ids_T < own.start) | (token_ids_T >= own.stop)
        rows_TD = self._weights.embed((token_ids_T - own.start).masked_fill_(others_T, 0))
        return self._ranks.sum(rows_TD.masked_fill_(others_T[:, None], 0.0)).to(torch.float32, copy=True)
