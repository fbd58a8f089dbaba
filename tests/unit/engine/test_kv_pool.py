"""The pool's shape, its limits, and the copies in and out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.facts import KvCacheDtype
from engine.kernels.kv_cache import gather_tokens, quantized_heads, scatter_tokens, store_kv
from engine.memory.kv_pool import KVPool, token_bytes
from engine.model_runner import DeviceName, ModelRunner
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams


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


def test_a_quantized_pool_gives_back_numbers(small_model: Any) -> None:
    """Close to what was written, by slot and by block; and it holds as many tokens in about a quarter of float32's memory."""
    facts = small_model("llama").facts
    pool = KVPool.for_model(facts, 12 * 8, 8, torch.float32, kv_cache_dtype="int8")
    pool.fill_randomly(torch.Generator().manual_seed(0))
    assert pool.data.shape == (3, 2, 12, 8, 2, 16 + 2)
    assert pool.data.nbytes == token_bytes(facts, torch.float32, kv_cache_dtype="int8") * 12 * 8
    written_2TKH = torch.randn(2, 11, 2, 16)
    slots = torch.randperm(12 * 8)[:11]
    store_kv(pool.layer_slots(1), slots, *quantized_heads(written_2TKH))
    step_2TK1 = written_2TKH.abs().amax(-1, keepdim=True) / 127
    assert ((pool.read(1, slots) - written_2TKH).abs() <= 0.52 * step_2TK1).all()
    blocks = torch.tensor([7, 2, 7])
    slots_of_blocks = (blocks[:, None] * 8 + torch.arange(8)).view(-1)
    assert torch.equal(pool.gather(2, blocks), pool.read(2, slots_of_blocks))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_formats_that_a_device_does_not_read_are_refused(small_model: Any, kv_cache_dtype: KvCacheDtype) -> None:
    device: DeviceName = "cuda" if kv_cache_dtype == "int8" else "cpu"
    options: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_kv_tokens": 64, "device": device}
    with pytest.raises(ConfigError, match=kv_cache_dtype) as caught:
        ModelRunner.load(small_model("llama").facts, kv_cache_dtype=kv_cache_dtype, **options)
    assert caught.value.param == "kv_cache_dtype"


def test_a_quantized_pool_serves_where_there_are_no_native_operators(small_model: Any, generate: Any) -> None:
    """Heads of 16: a prompt in one piece and in many says the same, as far as rounding lets it."""
    facts = small_model("llama").facts
    runner = ModelRunner.load(facts, dtype="float32", kv_cache_dtype="int8", block_size=8, num_kv_tokens=512)
    sampling = SamplingParams(seed=1, max_tokens=8, temperature=0, num_logprobs=3)
    prompt = [(7 * i) % 200 + 1 for i in range(60)]
    whole, cut = (generate(runner, [prompt], [sampling], chunk_tokens=tokens)[0] for tokens in (64, 7))
    for one, other in zip(whole, cut, strict=True):
        assert one.token_id == other.token_id
        assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
