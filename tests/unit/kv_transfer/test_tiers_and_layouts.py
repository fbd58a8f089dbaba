"""Which blocks on a disk a worker takes: those of its layout, also from before that told positions and the format of KV."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
