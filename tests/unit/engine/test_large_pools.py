"""Pools whose K alone has more than 2^31 numbers: nothing that computes with their last blocks counts in 32 bits.

They lie in files in memory, of which only what is touched takes any; nearly all of it is holes here. Results are compared, to
the bit, with those of a small pool of the same content. Nobody may look at the holes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.facts import KvCacheDtype
from engine.batch import Chunk, ForwardBatch
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.native.library import NativeLibrary
from engine.operators.native_step import NativeStep
from engine.operators.torch_step import TorchStep
from engine.operators.triton_step import TritonStep
from kv_transfer.cuda_pool_view import CudaPoolView
from kv_transfer.fingerprints.pushes import push_fingerprints
from kv_transfer.plan import Piece, SlotRun
from kv_transfer.pool_view import CpuPoolView, PoolView, Slots
from protocol.sampling import SamplingParams
from tests.tiny_models import tiny_facts

FACTS = tiny_facts("large-pool", num_heads=4, num_kv_heads=2, head_dim=64, max_model_len=1024)
BLOCK_SIZE, USED = 16, 96
"""Size of a block; blocks that are used, the last ones."""
LARGE = 2**31 // (BLOCK_SIZE * FACTS.num_kv_heads * FACTS.head_dim) + USED
LAYER = 1
"""What lies 2^31 numbers before its K or V is the pool's, so that a wrong place is seen, and no end of the process."""

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the pools are in the processor's memory"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs files in memory"),
]


@dataclass(frozen=True)
class Used:
    """A pool, and where its used blocks begin."""

    pool: KVPool
    first: int

    @property
    def content(self) -> Tensor:
        return self.pool.data[:, :, self.first :]

    def allocated(self) -> int:
        """Blocks of 512 bytes that were ever read or written."""
        assert self.pool.memory_fd is not None
        return os.fstat(self.pool.memory_fd).st_blocks


def small_and_large(dtype: torch.dtype, kv: KvCacheDtype = "auto") -> tuple[Used, Used]:
    small, large = (
        KVPool(
            num_layers=2,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_kv_heads=FACTS.num_kv_heads,
            head_dim=FACTS.head_dim,
            dtype=dtype,
            shared=True,
            kv_cache_dtype=kv,
        )
        for num_blocks in (USED, LARGE)
    )
    small.fill_randomly(torch.Generator().manual_seed(1))
    used = Used(large, LARGE - USED)
    used.content.copy_(small.data)
    assert large.layer_slots(LAYER)[0, : used.first * BLOCK_SIZE].numel() >= 2**31
    return Used(small, 0), used


def native(facts: Any, batch: ForwardBatch, pool: KVPool, frequencies: Tensor) -> NativeStep:
    library = NativeLibrary.load(1, pool.dtype)
    if library is None:
        pytest.skip("needs AVX2, and a C++ compiler or a wheel")
    return NativeStep(facts, batch, pool, frequencies, library)


KINDS: list[tuple[str, Any, torch.dtype, KvCacheDtype]] = [
    ("triton", TritonStep.of, torch.float32, "auto"),
    ("triton", TritonStep.of, torch.float16, "auto"),
    ("triton", TritonStep.of, torch.float16, "fp8"),
    ("native", native, torch.float32, "auto"),
    ("native", native, torch.bfloat16, "auto"),
    ("native", native, torch.float32, "int8"),
    ("native", native, torch.bfloat16, "int8"),
    ("torch", TorchStep, torch.float32, "auto"),
    ("torch", TorchStep, torch.float32, "int8"),
]


def chunks(first: int) -> list[Chunk]:
    """Single tokens and part of a prompt, behind contexts of several parts."""
    blocks = (first + torch.randperm(USED, generator=torch.Generator().manual_seed(2))).tolist()
    sampled = SamplingParams(seed=0, max_tokens=1)
    return [
        Chunk([5], 700, blocks[:44], sampled, 0),
        Chunk(list(range(20)), 600, blocks[44:83], sampled, 0),
        Chunk([9], 3, blocks[83:84], sampled, 0),
    ]


@pytest.mark.parametrize(
    ("make", "dtype", "kv"),
    [
        pytest.param(*step, id=f"{name} {step[1]} {step[2]}", marks=pytest.mark.slow if name == "triton" else ())
        for name, *step in KINDS
    ],
)
def test_a_step_in_the_last_blocks_is_that_in_a_small_pool(make: Any, dtype: torch.dtype, kv: KvCacheDtype) -> None:
    """Keys and values are stored, and attended to by single tokens and a prompt's."""
    small, large = small_and_large(dtype, kv)
    allocated, found = large.allocated(), []
    width = (FACTS.num_heads + 2 * FACTS.num_kv_heads) * FACTS.head_dim
    frequencies = inverse_frequencies(FACTS.head_dim, FACTS.rope_theta)
    for used in (small, large):
        before = used.content.clone()
        batch = ForwardBatch.build(chunks(used.first), BLOCK_SIZE)
        step = make(FACTS, batch, used.pool, frequencies)
        qkv_TA = torch.randn(len(batch.token_ids_T), width, generator=torch.Generator().manual_seed(3)).to(dtype)
        step.store(LAYER, qkv_TA)
        found.append(step.attend(LAYER, qkv_TA).clone())
        assert not torch.equal(used.content, before), "something was stored"
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
    assert torch.equal(small.content, large.content)
    assert large.allocated() == allocated, "what lies elsewhere was looked at"


@pytest.mark.parametrize("view_of", [CudaPoolView, CpuPoolView])
@pytest.mark.parametrize("heads", [None, range(1, 2)], ids=["all heads", "one head"])
def test_the_last_blocks_are_handed_over_as_those_of_a_small_pool(
    view_of: Callable[..., PoolView], heads: range | None
) -> None:
    """Gathered, fingerprinted, scattered and copied within the pool."""
    small, large = small_and_large(torch.bfloat16)
    allocated, layers, found = large.allocated(), range(2), []
    for used in (small, large):
        view, at = view_of(used.pool.layers(), heads), BLOCK_SIZE * used.first
        source = Slots([SlotRun(at + 85, 20), SlotRun(at + 640, 7)])
        into, others = Slots([SlotRun(at + 1000, 27)]), Slots([SlotRun(at + 1500, 27)])
        dense_L2THD = torch.empty(2, 2, len(source), *view.layers[0].shape[2:], dtype=torch.bfloat16)
        view.gather(layers, source, dense_L2THD)
        prints = push_fingerprints(view, [[Piece(0, at + 85, 11), Piece(1, at + 96, 9), Piece(1, at + 640, 7)]])
        prints.update(layers)
        view.scatter(layers, into, -dense_L2THD)
        view.copy_in(view.layers, source.ids_T, layers, others)
        found.append((prints.digests(), dense_L2THD))
    (digests, gathered), (large_digests, large_gathered) = found
    assert digests == large_digests
    assert torch.equal(gathered, large_gathered)
    assert torch.equal(small.content, large.content)
    assert large.allocated() == allocated, "what lies elsewhere was looked at"
