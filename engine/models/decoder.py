"""One dense decoder for Llama, Qwen2 and Qwen3: RMSNorm, rotary grouped-query attention, SwiGLU.

The families differ in flags of `ModelFacts`: biases on q, k and v (Qwen2), a norm on each head of q and k (Qwen3),
stretched rotary frequencies (Llama 3.1), an output head of its own or tied to the embedding.

Shape suffixes as in `engine.kernels`; D is the hidden size, S the rows that are sampled from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.kernels.activation import swiglu
from engine.kernels.attention import decode_attention, prefill_attention
from engine.kernels.kv_cache import store_kv
from engine.kernels.linear import Linear
from engine.kernels.norm import rms_norm
from engine.kernels.rope import Rotation, rotate, rotation
from engine.kv_pool import KVPool


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    embedding_VD: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Linear
    rope_frequencies: Tensor
    """[H/2], float32, scaling included."""


class Decoder:
    """The model on one rank. Holds weights, no state."""

    def __init__(self, facts: ModelFacts, weights: DecoderWeights) -> None:
        self._facts = facts
        self._weights = weights

    def forward(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None) -> Tensor | None:
        """Compute the batch, write its KV to the pool; float32 logits [S, V], None if no row is sampled from.

        `on_layer(i)` is called as soon as layer i's KV of the whole batch is in the pool.
        """
        weights, eps = self._weights, self._facts.rms_norm_eps
        x_TD = F.embedding(batch.token_ids_T, weights.embedding_VD)
        turn = rotation(weights.rope_frequencies, batch.positions_T, x_TD.dtype)
        for index, layer in enumerate(weights.layers):
            q_TNH, k_TKH, v_TKH = self._project(layer, rms_norm(x_TD, layer.attention_norm, eps), turn)
            slots_2SKH = pool.layer_slots(index)
            store_kv(slots_2SKH, batch.slots_T, k_TKH, v_TKH)
            if on_layer is not None:
                on_layer(index)
            x_TD += layer.output(_attend(batch, q_TNH, k_TKH, v_TKH, pool, index).flatten(1))
            x_TD += layer.down(swiglu(layer.gate_up(rms_norm(x_TD, layer.ffn_norm, eps))))
        if not batch.sampled_chunks:
            return None
        last_SD = rms_norm(x_TD.index_select(0, batch.sample_rows_S), weights.final_norm, eps)
        return weights.head(last_SD).float()

    def _project(self, layer: Layer, x_TD: Tensor, turn: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both rotated) and v."""
        heads, kv_heads = self._facts.num_heads, self._facts.num_kv_heads
        qkv_TNH = layer.qkv(x_TD).view(len(x_TD), heads + 2 * kv_heads, self._facts.head_dim)
        qk_TNH, v_TKH = qkv_TNH[:, : heads + kv_heads], qkv_TNH[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_TNH = rms_norm(qk_TNH[:, :heads], layer.q_norm, self._facts.rms_norm_eps)
            k_TKH = rms_norm(qk_TNH[:, heads:], layer.k_norm, self._facts.rms_norm_eps)
            qk_TNH = torch.cat((q_TNH, k_TKH), dim=1)
        rotated_TNH = rotate(qk_TNH, turn)
        return rotated_TNH[:, :heads], rotated_TNH[:, heads:], v_TKH


def _attend(batch: ForwardBatch, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, pool: KVPool, layer: int) -> Tensor:
    """Attention of every row, by the batch's parts, which cover its rows in order: [T, N, H]."""
    slots_2SKH = pool.layer_slots(layer)
    outs = [
        prefill_attention(q_TNH[span.rows], k_TKH[span.rows], v_TKH[span.rows], slots_2SKH, span.context_slots_L)
        for span in batch.prefills
    ]
    for group in batch.decodes:
        kv_2CKH = pool.gather(layer, group.blocks)
        # A weight of zero does not cancel a NaN that a former owner may have left.
        kv_2CKH.index_fill_(1, group.padding, 0.0)
        outs.append(decode_attention(q_TNH[group.rows], kv_2CKH, group.bias_B1L))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
