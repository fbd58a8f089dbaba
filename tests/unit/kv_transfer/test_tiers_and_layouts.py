"""Which blocks on a disk a worker takes: those of its layout, also from before that told positions and the format of KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.schema import ClusterConfig
from kv_transfer.tiers.node_tiers import open_tiers
from kv_transfer.tiers.pool_blocks import pool_blocks
from kv_transfer.tiers.store import BlockStore
from protocol.cache.keys import tenant_of
from protocol.messages import DISK, KvLayout
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
    assert store.put(KEY, tenant_of(""), blocks.outgoing(0))
    store.close()
    assert num_taken(tmp_path, LAYOUT) == 1
    assert num_taken(tmp_path, replace(LAYOUT, positions="rope=linear-2-0123abcd")) == 0
