"""Which blocks on a disk a worker takes: those of its layout, also from before that told positions and the format of KV."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import ClusterConfig
from kv_transfer.tiers import node_tiers
from kv_transfer.tiers.node_tiers import NodeTiers, _Tier, open_tiers
from kv_transfer.tiers.occupied import Occupied
from kv_transfer.tiers.pool_blocks import StagedBlocks, pool_blocks
from kv_transfer.tiers.store import BlockStore
from protocol.cache.keys import tenant_of
from protocol.cache.shares import TierBlock
from protocol.messages.load import DISK, MEMORY
from protocol.messages.workers import KvLayout
from tests.unit.kv_transfer.two_ends import HEAD_DIM, HEADS, LAYERS, LAYOUT, pool

BLOCK_SIZE = 8
KEY = bytes(range(32))
BEFORE = f"{LAYOUT.model_hash}\n{LAYOUT.dtype}\n{LAYERS}\n{HEADS}\n{HEAD_DIM}\n1\narithmetic\n{BLOCK_SIZE}"
"""What was written beside blocks when a layout had no more."""


def num_taken(folder: Path, layout: KvLayout) -> int:
    offloading = {"disk_gib": 0.1, "disk_dir": str(folder)}
    config = ClusterConfig.model_validate({"block_size": BLOCK_SIZE, "kv_offloading": offloading})
    tiers = open_tiers(config, pool(block_size=BLOCK_SIZE).data, layout, "arithmetic", b"secret")
    try:
        return tiers.get(DISK, [KEY], [1])
    finally:
        tiers.close()


def test_a_disk_tier_outlives_an_upgrade_but_not_other_positions(tmp_path: Path) -> None:
    blocks = pool_blocks(pool(block_size=BLOCK_SIZE).data)
    store = BlockStore(tmp_path, BEFORE.encode(), blocks.block_bytes, 2**20)
    assert store.put([(KEY, tenant_of(""), blocks.outgoing(0))])
    store.close()
    assert num_taken(tmp_path, LAYOUT) == 1
    assert num_taken(tmp_path, replace(LAYOUT, positions="rope=linear-2-0123abcd")) == 0


def test_two_tiers_are_read_at_once_into_a_pool_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a staging block of its own, which a pool on a GPU needs: here each read of memory waits for one of the disk."""
    monkeypatch.setattr(node_tiers, "pool_blocks", StagedBlocks)
    blocks = pool(block_size=BLOCK_SIZE).data
    num_each = blocks.shape[2] // 2
    blocks.copy_(torch.randn(blocks.shape))
    wanted, keys = blocks.clone(), [bytes([number]) * 32 for number in range(2 * num_each)]
    block_bytes = StagedBlocks(blocks).block_bytes
    stores = {name: BlockStore(tmp_path / name, b"model", block_bytes, 2**20) for name in (MEMORY, DISK)}
    outgoing = StagedBlocks(blocks)
    for number, key in enumerate(keys):
        stores[MEMORY if number < num_each else DISK].put([(key, tenant_of(""), outgoing.outgoing(number))])
    occupied = {name: Occupied(tmp_path / name, b"model", keep=False) for name in stores}
    tiers = NodeTiers({name: _Tier(stores[name], occupied[name], 0.0) for name in stores}, blocks)
    blocks.zero_()
    memory_read, disk_read, read = threading.Event(), threading.Event(), stores[MEMORY].get

    def wait_for_disk(key: bytes, slices: Any) -> bool:
        found = read(key, slices)
        memory_read.set()
        assert disk_read.wait(20)
        return found

    monkeypatch.setattr(stores[MEMORY], "get", wait_for_disk)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(tiers.get, MEMORY, keys[:num_each], range(num_each))
        assert memory_read.wait(20)
        assert tiers.get(DISK, keys[num_each:], range(num_each, 2 * num_each)) == num_each
        disk_read.set()
        assert reading.result(20) == num_each
    tiers.close()
    assert torch.equal(blocks, wanted)


class Stream:
    """A stream of the stand-in for a device."""

    current: Stream

    def __init__(self, _: object = None) -> None:
        self.num_waits = 0
        """How often somebody waited for what this stream has been told to do."""

    def wait_stream(self, other: Stream) -> None:
        other.num_waits += 1

    def synchronize(self) -> None:
        self.num_waits += 1


class OnDevice(torch.Tensor):
    """A tensor of the stand-in for a device, where a copy between it and the processor's memory waits for its stream."""

    is_cuda = True

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        Stream.current.num_waits += 1
        return super().copy_(other, non_blocking)


@contextmanager
def current(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


def test_blocks_that_are_written_and_read_together_wait_for_the_engine_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: engine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream.current)
    monkeypatch.setattr(node_tiers, "pool_blocks", StagedBlocks)
    blocks = pool(block_size=BLOCK_SIZE).data.normal_().as_subclass(OnDevice)
    wanted, keys = blocks.clone(), [bytes([number]) * 32 for number in range(blocks.shape[2])]
    assert len(keys) == 8
    store = BlockStore(tmp_path, b"model", StagedBlocks(blocks).block_bytes, 2**20)
    tiers = NodeTiers({DISK: _Tier(store, None, 0.0)}, blocks)
    tiers.put([TierBlock(key, "", place) for place, key in enumerate(keys)])
    assert engine.num_waits == 1, "the blocks may have been written in a step that is still launched"
    blocks.zero_()
    assert tiers.get(DISK, keys, range(8)) == 8
    assert engine.num_waits == 2, "what a stopped job's step still writes comes first"
    assert torch.equal(blocks, wanted)
    tiers.close()
