"""The pool's shape, its limits, and the copies in and out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels.kv_cache import gather_tokens, scatter_tokens, store_kv
from engine.memory.kv_pool import KVPool
from protocol.errors import ConfigError


def test_shape_and_slot_view(small_model: Any) -> None:
    pool = KVPool.for_model(small_model("llama").facts, 70, 16, torch.bfloat16)
    assert pool.data.shape == (3, 2, 4, 16, 2, 16)
    slots = pool.layer_slots(1)
    assert slots.shape == (2, 64, 2, 16)
    slots[1, 2 * 16 + 5] = 7.0
    assert (pool.data[1, 1, 2, 5] == 7.0).all()
    assert (pool.num_blocks, pool.block_size, pool.dtype) == (4, 16, torch.bfloat16)


def test_memory_is_touched_only_when_written(small_model: Any) -> None:
    """A pool larger than what a test may use is made at once."""
    pool = KVPool.for_model(small_model("llama").facts, 4_000_000, 16, torch.float32)
    assert pool.data.nbytes > 3_000_000_000
    pool.layer_slots(2)[0, -1] = 1.0


@pytest.mark.parametrize(("num_tokens", "named"), [(15, "one block of 16"), (10**12, "at most [0-9]+ tokens")])
def test_impossible_pools_are_refused(small_model: Any, num_tokens: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        KVPool.for_model(small_model("llama").facts, num_tokens, 16, torch.float32)
    assert caught.value.param == "kv_cache_tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_gather_and_scatter(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots_2SKH = torch.zeros(2, 40, 3, 8, dtype=dtype)
    slot_ids_T = torch.randperm(40)[:11]
    kv_TKH = torch.randn(11, 8, 8).to(dtype)
    store_kv(slots_2SKH, slot_ids_T, kv_TKH[:, :3], kv_TKH[:, 3:6])
    out_2TKH = torch.empty(2, 11, 3, 8, dtype=dtype)
    gather_tokens(slots_2SKH, slot_ids_T, out_2TKH)
    assert torch.equal(out_2TKH, torch.stack((kv_TKH[:, :3], kv_TKH[:, 3:6])))
    elsewhere_2SKH = torch.zeros_like(slots_2SKH)
    scatter_tokens(elsewhere_2SKH, slot_ids_T, out_2TKH)
    assert torch.equal(elsewhere_2SKH, slots_2SKH)


def test_gathered_blocks_come_in_order_and_leave_the_pool_alone(small_model: Any) -> None:
    pool = KVPool.for_model(small_model("llama").facts, 12 * 8, 8, torch.float32)
    pool.data.normal_()
    before = pool.data.clone()
    for blocks in ([7, 2, 7], [1], [11, 0, 3, 5]):
        out_2CKH = pool.gather(2, torch.tensor(blocks))
        assert torch.equal(out_2CKH, before[2][:, blocks].flatten(1, 2))
        out_2CKH.zero_()
    assert torch.equal(pool.data, before)
