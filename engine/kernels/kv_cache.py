"""Moving tokens' keys and values between the KV pool and dense tensors.

`slots_2SKH` is one layer of the pool, `KVPool.layer_slots(layer)`: [2 (K, V), slots, KV heads, head size], where slot
`block * block_size + offset` holds one token. Slot ids are int64 tensors; the caller guarantees that they are in range.
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(slots_2SKH: Tensor, slot_mapping_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    """Write one layer's new keys and values into their slots."""
    slots_2SKH[0].index_copy_(0, slot_mapping_T, k_TKH)
    slots_2SKH[1].index_copy_(0, slot_mapping_T, v_TKH)


def gather_tokens(slots_2SKH: Tensor, slot_ids_T: Tensor, out_2TKH: Tensor) -> None:
    """Copy tokens out of the pool, in the order of `slot_ids_T`, into `out_2TKH` (contiguous, the pool's dtype)."""
    torch.index_select(slots_2SKH, 1, slot_ids_T, out=out_2TKH)


def scatter_tokens(slots_2SKH: Tensor, slot_ids_T: Tensor, in_2TKH: Tensor) -> None:
    """Copy dense tokens into the pool: the inverse of `gather_tokens`. Slot ids must be distinct."""
    slots_2SKH.index_copy_(1, slot_ids_T, in_2TKH)
