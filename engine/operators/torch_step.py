"""A step by torch's operators: any dtype. The reference for the others, and the path of machines without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.kernels.activation import swiglu
from engine.kernels.attention import decode_attention, prefill_attention
from engine.kernels.kv_cache import numbers_of, store_kv, stored_heads
from engine.kernels.norm import norm_heads, rms_norm
from engine.kernels.rope import rotate, rotation
from engine.memory.kv_pool import KVPool

_CHEAP_PADDING = 64
"""Tokens of padding that cost less than one more attention call."""
_CONTEXT_MULTIPLE = 16
"""Contexts are padded to a multiple of the widest vector, so that a sum's order does not depend on how much is padded."""
_NO_WINDOW = 2**62
"""Tokens that a token sees where there is no sliding window: more than there are."""
_GROUP_TOKENS = 4096
"""Tokens of context that one attention call gathers, if it holds more than one sequence: they should stay in the cache."""


@dataclass(frozen=True)
class PrefillSpan:
    """Rows of one chunk of several tokens."""

    rows: slice
    context_slots_L: Tensor | None
    """Slots of the earlier positions; None if the chunk is the sequence's first."""
    unseen: int = 0
    """So many of them, the first ones, lie before the windows of all layers, and may be anything."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of sequences with one token each, whose contexts are padded to a common length."""

    rows: slice
    blocks: Tensor
    """Blocks of each context, the new token included, one sequence after the other; any block where padded."""
    biases_B1L: Mapping[int, Tensor]
    """What is added to the scores, in the pool's dtype: 0, and minus infinity where padded, or before the sliding window.
    By the length of the window; 0 is without one."""
    padding: Tensor
    """Where the B * L tokens of `blocks` are padding, or lie before the windows of all layers."""


class TorchStep:
    """One batch on its way through the layers, computed by torch's operators on a CPU. A `engine.operators.Step`."""

    def __init__(self, facts: ModelFacts, batch: ForwardBatch, pool: KVPool, frequencies: Tensor) -> None:
        self._num_heads = facts.num_heads
        self._num_kv_heads = facts.num_kv_heads
        self.token_ids_T = torch.from_numpy(batch.token_ids_T)
        self._pool = pool
        self._slots_T = torch.from_numpy(batch.slots_T)
        self._rotation = rotation(frequencies, torch.from_numpy(batch.positions_T), pool.dtype, facts.attention_factor)
        windows = set(facts.sliding_windows) or {0}
        self._prefills = prefill_spans(batch, windows)
        self._decodes = decode_groups(batch, pool.dtype, windows)
        self._facts = facts

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD if delta_TD is None else x_TD.add_(delta_TD), weight_D, eps)

    def norm_heads(self, qkv_TA: Tensor, q_norm_H: Tensor, k_norm_H: Tensor, eps: float) -> None:
        norm_heads(qkv_TA, q_norm_H, k_norm_H, eps, self._num_kv_heads)

    def store(self, layer: int, qkv_TA: Tensor) -> None:
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv_TNH = qkv_TA.view(qkv_TA.shape[0], heads + 2 * kv_heads, -1)
        qk_TNH, v_TKH = rotate(qkv_TNH[:, : heads + kv_heads], self._rotation), qkv_TNH[:, heads + kv_heads :]
        qkv_TNH[:, : heads + kv_heads] = qk_TNH
        k, v = (stored_heads(each_TKH, self._pool.kv_cache_dtype) for each_TKH in (qk_TNH[:, heads:], v_TKH))
        store_kv(self._pool.layer_slots(layer), self._slots_T, k, v)
        if self._pool.kv_cache_dtype != "auto":
            # The rows of this step see each other as later steps will.
            qkv_TNH[:, heads:-kv_heads] = numbers_of(k, self._pool.kv_cache_dtype, qkv_TA.dtype)
            qkv_TNH[:, -kv_heads:] = numbers_of(v, self._pool.kv_cache_dtype, qkv_TA.dtype)

    def attend(self, layer: int, qkv_TA: Tensor) -> Tensor:
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv_TNH = qkv_TA.view(qkv_TA.shape[0], heads + 2 * kv_heads, -1)
        q_TNH, k_TKH, v_TKH = qkv_TNH[:, :heads], qkv_TNH[:, heads:-kv_heads], qkv_TNH[:, -kv_heads:]
        outs, window = [], self._facts.window(layer)
        for span in self._prefills:
            context = None if span.context_slots_L is None else self._pool.read(layer, span.context_slots_L)
            if context is not None and span.unseen:
                context[:, : span.unseen] = 0.0  # what the pool holds for them may be another's NaN
            outs.append(prefill_attention(q_TNH[span.rows], k_TKH[span.rows], v_TKH[span.rows], context, window))
        for group in self._decodes:
            kv_2CKH = self._pool.gather(layer, group.blocks)
            # A weight of zero does not cancel a NaN that a former owner may have left.
            kv_2CKH.index_fill_(1, group.padding, 0.0)
            outs.append(decode_attention(q_TNH[group.rows], kv_2CKH, group.biases_B1L[window]))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)

    def swiglu(self, gate_up_TI: Tensor) -> Tensor:
        return swiglu(gate_up_TI)


def prefill_spans(batch: ForwardBatch, windows: Collection[int] = (0,)) -> list[PrefillSpan]:
    """The chunks of several tokens."""
    spans, widest = [], max(windows) if all(windows) else _NO_WINDOW
    for chunk in range(batch.num_longer):
        slots = batch.tables_CW[chunk][:, None] * batch.block_size + np.arange(batch.block_size)
        context = torch.from_numpy(slots.reshape(-1)[: batch.starts_C[chunk]])
        unseen = max(0, int(batch.starts_C[chunk]) + 1 - widest)
        spans.append(PrefillSpan(batch.rows(chunk), context if len(context) else None, unseen))
    return spans


def decode_groups(batch: ForwardBatch, dtype: torch.dtype, windows: Collection[int] = (0,)) -> list[DecodeGroup]:
    """The single tokens, which come by falling context length.

    A context is padded to about twice its length at most, so a long one among many short ones costs only itself.
    """
    groups = []
    multiple = max(_CONTEXT_MULTIPLE, batch.block_size)
    widest = max(windows) if all(windows) else _NO_WINDOW
    first = batch.num_longer
    row = int(batch.row_ends_C[first - 1]) if first else 0
    while first < len(batch.ends_C):
        ends = batch.ends_C[first:]
        padded = ceil_div(int(ends[0]), multiple) * multiple
        size = int(np.count_nonzero(ends[0] - ends <= np.maximum(ends, _CHEAP_PADDING)))
        size = min(size, max(1, _GROUP_TOKENS // padded))
        num_blocks = padded // batch.block_size
        blocks = np.zeros((size, num_blocks), dtype=np.int64)
        tables = batch.tables_CW[first : first + size, :num_blocks]
        blocks[:, : tables.shape[1]] = tables
        is_padding = torch.from_numpy(np.arange(padded) >= ends[:size, None])
        is_unseen = torch.from_numpy(np.arange(padded) < ends[:size, None] - widest)
        biases = {}
        for window in windows:
            before = torch.from_numpy(np.arange(padded) < ends[:size, None] - (window or padded))
            bias = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding | before, -torch.inf)
            biases[window] = bias[:, None]
        padding = (is_padding | is_unseen).view(-1).nonzero().view(-1)
        groups.append(DecodeGroup(slice(row, row + size), torch.from_numpy(blocks).view(-1), biases, padding))
        row, first = row + size, first + size
    return groups
