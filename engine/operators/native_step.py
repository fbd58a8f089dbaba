"""A step by the native operators: bfloat16 or float32 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.kernels.norm import norm_heads
from engine.kernels.rope import angles, scaled
from engine.memory.kv_pool import KVPool
from engine.native.library import NativeLibrary


class NativeStep:
    """One batch on its way through the layers, computed by the native operators on a CPU. A `engine.operators.Step`."""

    def __init__(
        self, facts: ModelFacts, batch: ForwardBatch, pool: KVPool, frequencies: Tensor, library: NativeLibrary
    ) -> None:
        self.token_ids_T = torch.from_numpy(batch.token_ids_T)
        self._facts = facts
        self._num_heads = facts.num_heads
        self._batch = batch
        self._pool = pool
        self._library = library
        self._frequencies = frequencies
        self._cos_TF, self._sin_TF = self._rotation(batch)
        self._slots_T = torch.from_numpy(batch.slots_T)
        self._tables_CW = torch.from_numpy(batch.tables_CW)
        # Sequences with few rows: single tokens, and in `refill` those with drafts.
        self._few_tables_BW = self._tables_CW[batch.num_longer :]
        self._few_lengths_B = torch.from_numpy(batch.ends_C)[batch.num_longer :]
        self._few_ends_B = torch.arange(1, len(self._few_lengths_B) + 1)
        self._longer_rows = [batch.rows(chunk) for chunk in range(batch.num_longer)]
        tokens = len(batch.token_ids_T)
        self._normed_TD = torch.empty((tokens, facts.hidden_size), dtype=library.dtype)
        self._gated_TI = torch.empty((tokens, facts.intermediate_size), dtype=library.dtype)
        self._attended_TNH = torch.empty((tokens, facts.num_heads, facts.head_dim), dtype=library.dtype)
        self._num_longer_rows = self._longer_rows[-1].stop if self._longer_rows else 0

    def refill(self, batch: ForwardBatch) -> None:
        """Go on with another batch of so many rows, a few for a sequence, in the same memory; its tables may be narrower.

        This step's own batch was of single tokens.
        """
        assert len(batch.token_ids_T) == len(self.token_ids_T)
        assert self._batch.num_longer == 0
        sequences = len(batch.ends_C)
        for own, new in zip((self._cos_TF, self._sin_TF), self._rotation(batch), strict=True):
            own.copy_(new)
        self.token_ids_T.copy_(torch.from_numpy(batch.token_ids_T))
        self._slots_T.copy_(torch.from_numpy(batch.slots_T))
        self._tables_CW[:sequences, : batch.tables_CW.shape[1]] = torch.from_numpy(batch.tables_CW)
        self._few_lengths_B[:sequences] = torch.from_numpy(batch.ends_C)
        self._few_lengths_B[sequences:] = 0
        self._few_ends_B[:sequences] = torch.from_numpy(batch.row_ends_C)
        self._few_ends_B[sequences:] = len(batch.token_ids_T)

    def _rotation(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Cosines and sines. In float64, since libraries round differently on different processors: what is then rounded to
        float32 is the same.
        """
        angles_TF = angles(self._frequencies, torch.from_numpy(batch.positions_T)).double()
        cos_TF, sin_TF = scaled(angles_TF.cos(), angles_TF.sin(), self._facts.attention_factor)
        return cos_TF.float(), sin_TF.float()

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        self._library.add_rms_norm(x_TD, delta_TD, weight_D, eps, self._normed_TD)
        return self._normed_TD

    def norm_heads(self, qkv_TA: Tensor, q_norm_H: Tensor, k_norm_H: Tensor, eps: float) -> None:
        self._library.calls.make(norm_heads, qkv_TA, q_norm_H, k_norm_H, eps, self._facts.num_kv_heads)

    def store(self, layer: int, qkv_TA: Tensor) -> None:
        slots_2SKH = self._pool.layer_slots(layer)
        self._library.rotate_and_store(qkv_TA, self._cos_TF, self._sin_TF, self._slots_T, slots_2SKH, self._num_heads)

    def attend(self, layer: int, qkv_TA: Tensor) -> Tensor:
        slots_2SKH, block_size = self._pool.layer_slots(layer), self._batch.block_size
        out_TNH, window = self._attended_TNH, self._facts.window(layer)
        for chunk, rows in enumerate(self._longer_rows):
            start = int(self._batch.starts_C[chunk])
            table_W, out = self._tables_CW[chunk], out_TNH[rows]
            self._library.prefill_attention(qkv_TA[rows], slots_2SKH, table_W, start, block_size, out, window)
        if self._few_lengths_B.shape[0]:
            self._library.decode_attention(
                qkv_TA[self._num_longer_rows :],
                slots_2SKH,
                self._few_tables_BW,
                self._few_lengths_B,
                self._few_ends_B,
                block_size,
                out_TNH[self._num_longer_rows :],
                window,
            )
        return out_TNH.flatten(1)

    def swiglu(self, gate_up_TI: Tensor) -> Tensor:
        self._library.swiglu(gate_up_TI, self._gated_TI)
        return self._gated_TI
