"""A step by the Triton kernels: any float format, on a GPU.

Nothing here waits for the device or asks it anything, and what is launched depends on the batch's shape alone: a step may be
captured into a CUDA graph and replayed after its `DeviceBatch` has been filled with another batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.kernels.norm import norm_heads
from engine.kernels.rope import angles, scaled
from engine.kernels.triton.decode_attention import DecodeAttention
from engine.kernels.triton.kv_cache import rotate_and_store
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.layers import add_norm, swiglu
from engine.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from engine.memory.kv_pool import KVPool
from engine.operators.device_batch import BatchShape, DeviceBatch


class TritonStep:
    """One batch on its way through the layers, computed by Triton kernels on a GPU. A `engine.operators.Step`."""

    def __init__(self, facts: ModelFacts, batch: DeviceBatch, pool: KVPool, frequencies: Tensor) -> None:
        """Set aside what the step's kernels write, on the device of `batch`."""
        shape, heads = batch.shape, facts.num_heads
        device = batch.positions_T.device
        self.token_ids_T = batch.token_ids_T
        self._facts = facts
        self._num_heads = heads
        self._batch = batch
        self._pool = pool
        angles_TF = angles(frequencies, batch.positions_T)
        self._cos_TF, self._sin_TF = scaled(angles_TF.cos(), angles_TF.sin(), facts.attention_factor)
        self._normed_TD = torch.empty((shape.num_rows, facts.hidden_size), dtype=pool.dtype, device=device)
        self._gated_TI = torch.empty((shape.num_rows, facts.intermediate_size), dtype=pool.dtype, device=device)
        self._attended_TNH = torch.empty((shape.num_rows, heads, facts.head_dim), dtype=pool.dtype, device=device)
        self._decode = DecodeAttention(
            shape.num_singles, facts.max_model_len, heads, facts.num_kv_heads, facts.head_dim, pool.dtype, device
        )
        if shape.num_singles:
            self._decode.plan(batch.lengths_R).run()

    @classmethod
    def of(cls, facts: ModelFacts, batch: ForwardBatch, pool: KVPool, frequencies: Tensor) -> TritonStep:
        """A step of exactly this batch."""
        longer = slice(0, batch.num_longer)
        starts_C, ends_C = batch.starts_C[longer], batch.ends_C[longer]
        rows_C = batch.row_ends_C[longer] - (ends_C - starts_C)
        tiles_P4 = prefill_tiles(starts_C, ends_C, rows_C, facts.num_heads // facts.num_kv_heads, pool.dtype)
        num_longer_rows = int((ends_C - starts_C).sum())
        num_singles = len(batch.ends_C) - batch.num_longer
        shape = BatchShape(batch.num_longer, num_longer_rows, len(tiles_P4), num_singles, batch.tables_CW.shape[1])
        device_batch = DeviceBatch(shape, pool.data.device)
        device_batch.fill(batch, tiles_P4)
        return cls(facts, device_batch, pool, frequencies)

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        add_norm(x_TD, delta_TD, weight_D, eps, self._normed_TD).run()
        return self._normed_TD

    def norm_heads(self, qkv_TA: Tensor, q_norm_H: Tensor, k_norm_H: Tensor, eps: float) -> None:
        norm_heads(qkv_TA, q_norm_H, k_norm_H, eps, self._facts.num_kv_heads)

    def store(self, layer: int, qkv_TA: Tensor) -> None:
        slots_2SKH = self._slots(layer)
        rotate_and_store(qkv_TA, self._cos_TF, self._sin_TF, self._batch.slots_T, slots_2SKH, self._num_heads).run()

    def attend(self, layer: int, qkv_TA: Tensor) -> Tensor:
        for launch in self._attention(qkv_TA, self._slots(layer), self._facts.window(layer)):
            launch.run()
        return self._attended_TNH.flatten(1)

    def swiglu(self, gate_up_TI: Tensor) -> Tensor:
        swiglu(gate_up_TI, self._gated_TI).run()
        return self._gated_TI

    def _slots(self, layer: int) -> Tensor:
        """One layer of the pool, as numbers."""
        slots_2SKH = self._pool.layer_slots(layer)
        return slots_2SKH.view(torch.float8_e4m3fn) if self._pool.kv_cache_dtype == "fp8" else slots_2SKH

    def _attention(self, qkv_TA: Tensor, slots_2SKH: Tensor, window: int) -> Iterable[Launch]:
        batch, block_size, out_TNH = self._batch, self._pool.block_size, self._attended_TNH
        if batch.shape.num_longer:
            tables_CW = batch.longer_tables_CW
            yield prefill_attention(qkv_TA, slots_2SKH, tables_CW, batch.tiles_P4, block_size, out_TNH, window)
        if batch.shape.num_singles:
            first = batch.shape.num_longer_rows
            tables_RW, lengths_R = batch.single_tables_RW, batch.lengths_R
            out = out_TNH[first:]
            yield from self._decode.launches(qkv_TA[first:], slots_2SKH, tables_RW, lengths_R, block_size, out, window)
