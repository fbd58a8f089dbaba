"""A pool's memory is mapped a little ahead of its use, and no further. /proc/self/pagemap is the witness."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Chunk
from engine.memory import populator as populator_module
from engine.memory.kv_pool import KVPool
from engine.memory.populator import AHEAD_TOKENS, TOGETHER_TOKENS, Populator, memory_is_short
from engine.model_runner import ModelRunner

BLOCK_SIZE = 8
AHEAD, TOGETHER = AHEAD_TOKENS // BLOCK_SIZE, TOGETHER_TOKENS // BLOCK_SIZE
KEPT = AHEAD + 3 * TOGETHER + 1
"""Blocks that a pool may keep."""


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What this machine is said to have."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24684024 kB\nMemFree: 100 kB\nMemAvailable:   12342012 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(populator_module, "_MEMINFO", meminfo)
    return meminfo


def pool_of(num_blocks: int, shared: bool, num_kept: int = KEPT) -> KVPool:
    """Rows of 60 bytes and blocks of 480: nothing begins on a page."""
    return KVPool(
        num_layers=3,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=3,
        head_dim=10,
        dtype=torch.bfloat16,
        num_kept=num_kept,
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


def no_further(pool: KVPool, end: int) -> bool:
    """Whether behind this block nothing is mapped but for readahead, and for what is mapped together."""
    return mapped_pages(pool.data[1, 0, end + 1 + TOGETHER :])[0] <= 16


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_are_mapped_ahead_of_their_use_and_keep_what_they_hold(shared: bool) -> None:
    pool = pool_of(4 * AHEAD, shared)
    pool.layer_slots(1)[1, 777] = 7.0
    populator = Populator(pool)
    populator.wait()
    assert are_mapped(pool, 0, KEPT)
    for block in (KEPT, KEPT + TOGETHER, KEPT + AHEAD):
        with populator.step([[block]]):
            pass
        populator.wait()
        assert are_mapped(pool, 0, block + 1 + AHEAD)
        if shared:  # other memory may have been used before
            assert no_further(pool, block + 1 + AHEAD)
    assert (pool.layer_slots(1)[1, 777] == 7.0).all()
    with populator.step([[4 * AHEAD - 1]]):
        pass
    populator.wait()
    assert are_mapped(pool, 0, 4 * AHEAD)


def test_what_is_kept_leads_to_no_more_memory() -> None:
    """Steps of few blocks that lie anywhere among those that may be kept; then steps of many."""
    pool = pool_of(4 * AHEAD, shared=True)
    populator = Populator(pool)
    with populator.step([[1, KEPT - 1], [1, 2, KEPT - 1]]):
        pass
    populator.wait()
    assert are_mapped(pool, 0, KEPT)
    assert no_further(pool, KEPT)
    with populator.step([range(KEPT)]):
        pass
    populator.wait()
    assert are_mapped(pool, 0, KEPT + AHEAD)
    assert no_further(pool, KEPT + AHEAD)


def test_what_can_wait_is_not_mapped_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populator_module, "_IDLE_S", 1.0)
    pool = pool_of(4 * AHEAD, shared=True, num_kept=3 * AHEAD)
    populator = Populator(pool)
    with populator.step([[0]]):
        monkeypatch.setattr(populator_module, "_IDLE_S", 0.01)
        deadline = time.monotonic() + 30
        while not are_mapped(pool, 0, 1 + AHEAD):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(1.3)  # in which the rest could be mapped several times
        assert no_further(pool, 1 + AHEAD)
    populator.wait()
    assert are_mapped(pool, 0, 3 * AHEAD)


def test_a_machine_that_is_short_of_memory_is_not_asked_for_more_than_soon_is_used(enough_memory: Path) -> None:
    assert not memory_is_short()
    enough_memory.write_text(enough_memory.read_text().replace("12342012", "12342011"))
    assert memory_is_short()
    pool = pool_of(4 * AHEAD, shared=True, num_kept=3 * AHEAD)
    populator = Populator(pool)
    with populator.step([[0]]):
        pass
    populator.wait()
    assert are_mapped(pool, 0, 1 + AHEAD)
    assert no_further(pool, 1 + AHEAD)


def test_a_runner_s_pool_is_mapped_ahead_of_its_steps(small_model: Any) -> None:
    facts = small_model("llama").facts
    runner = ModelRunner.load(
        facts,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_tokens=4 * AHEAD_TOKENS,
        kept_kv_tokens=AHEAD_TOKENS,
        shared_kv=True,
    )
    assert runner.populator is not None
    runner.populator.wait()
    assert are_mapped(runner.pool, 0, AHEAD)
    for block in (AHEAD, 1):
        runner.execute([Chunk((5,), 0, [block], None, 0)])
        runner.populator.wait()
        assert are_mapped(runner.pool, 0, AHEAD + 1 + AHEAD)
    assert no_further(runner.pool, AHEAD + 1 + AHEAD)


def test_a_process_ends_well_though_there_is_memory_to_map() -> None:
    """The thread has ended when the interpreter is taken down: it holds tensors, whose release would abort the process."""
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", _ENDS_EARLY], capture_output=True, text=True, timeout=60)
    took_s = time.monotonic() - began
    assert (ended.returncode, ended.stdout) == (0, "mapping True\nmapping False\n"), ended.stderr
    assert took_s < 30, "it waits for what is mapped at that moment, not for all of the memory"


_ENDS_EARLY = """
import atexit, threading, torch
from engine.memory.kv_pool import KVPool
from engine.memory.populator import AHEAD_TOKENS, Populator

blocks = 4 * AHEAD_TOKENS // 16
pool = KVPool(num_layers=1, num_blocks=blocks, num_kept=blocks, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)
Populator._is_idle = lambda self: False  # so the rest of the pool waits
populator = Populator(pool)
[thread] = [each for each in threading.enumerate() if each.name == "kv-populate"]

def tell():
    print("mapping", thread.is_alive(), flush=True)

tell()
atexit.register(tell)
"""
