"""A pool's memory is mapped a little ahead of its use, and no further. /proc/self/pagemap is the witness."""

from __future__ import annotations

import mmap
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Chunk
from engine.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.populator import AHEAD_TOKENS, TOGETHER_TOKENS, Populator

BLOCK_SIZE = 8
AHEAD, TOGETHER = AHEAD_TOKENS // BLOCK_SIZE, TOGETHER_TOKENS // BLOCK_SIZE


def pool_of(num_blocks: int, shared: bool) -> KVPool:
    """Rows of 60 bytes and blocks of 480: nothing begins on a page."""
    return KVPool(
        num_layers=3,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=3,
        head_dim=10,
        dtype=torch.bfloat16,
        shared=shared,
    )


def mapped_pages(blocks: torch.Tensor) -> tuple[int, int]:
    """Of those that these blocks touch: how many are in memory, which bit 63 of a page's eight bytes says; and all."""
    first, last = blocks.data_ptr() // mmap.PAGESIZE, (blocks.data_ptr() + blocks.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = array("Q", pagemap.read(8 * (last - first + 1)))
    return sum(entry >> 63 for entry in entries), len(entries)


def are_mapped(pool: KVPool, begin: int, end: int) -> bool:
    halves = [half[begin:end] for layer in pool.data for half in layer]
    return all(mapped == pages for mapped, pages in map(mapped_pages, halves))


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_are_mapped_ahead_of_their_use_and_keep_what_they_hold(shared: bool) -> None:
    pool = pool_of(10 * AHEAD, shared)
    pool.layer_slots(1)[1, 777] = 7.0
    populator = Populator(pool)
    for block in (-1, 0, TOGETHER, TOGETHER + 1, 3 * AHEAD):
        populator.reach(block)
        populator.wait()
        assert are_mapped(pool, 0, block + 1 + AHEAD)
        if shared:  # other memory may have been used before
            assert mapped_pages(pool.data[1, 0, block + 2 + AHEAD + TOGETHER :])[0] <= 16, "no further, but for readahead"
    assert (pool.layer_slots(1)[1, 777] == 7.0).all()
    populator.reach(10 * AHEAD - 1)
    populator.wait()
    assert are_mapped(pool, 0, 10 * AHEAD)


def test_a_runner_s_pool_is_mapped_ahead_of_its_steps(small_model: Any) -> None:
    facts = small_model("llama").facts
    tokens = 10 * AHEAD_TOKENS
    runner = ModelRunner.load(facts, dtype="float32", block_size=BLOCK_SIZE, num_kv_tokens=tokens, shared_kv=True)
    assert runner.populator is not None
    runner.populator.wait()
    assert are_mapped(runner.pool, 0, AHEAD)
    for block in (2 * AHEAD, 1):
        runner.execute([Chunk((5,), 0, [block], None, 0)])
        runner.populator.wait()
        assert are_mapped(runner.pool, 2 * AHEAD if block > 1 else 0, 3 * AHEAD)
    assert mapped_pages(runner.pool.data[1, 0, 4 * AHEAD :])[0] <= 16
