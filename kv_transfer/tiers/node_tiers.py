"""The tiers of one worker: what its pool lets go lies in the node's memory, and on its disk, for all workers of the node.

    pool ──put──► memory tier (tmpfs) and disk tier      both hold what comes, each as much as it may
    pool ◄──get── either of them                          what is not there, or not whole, is computed

The blocks of a paced worker take little memory. So its tiers count as many bytes for each as the profile says that the real
model's would take, and reading takes the time of these.

Each rank of a worker of several has its own heads of a block, under a key of its own (`share_key`), in the same folders as the
others. `gang_tiers` has them write and read together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from torch import Tensor

from configs.paced.profile import load_paced_profile
from configs.schema import ClusterConfig
from kv_transfer.tiers.block_file import file_bytes
from kv_transfer.tiers.occupied import Occupied, memory_folder, remove_left
from kv_transfer.tiers.pool_blocks import pool_blocks
from kv_transfer.tiers.store import BlockStore
from protocol.cache.keys import tenant_of
from protocol.cache.shares import TierBlock
from protocol.errors import ConfigError, TandemError
from protocol.messages.load import DISK, MEMORY, TierReport
from protocol.messages.workers import KvLayout

GIB = 2**30


@dataclass(frozen=True)
class _Tier:
    store: BlockStore
    occupied: Occupied | None
    """None at a rank that is not its worker's first, which occupies the folder for all of them. The others may be killed once
    it has ended, so they must not keep it from being removed.
    """
    block_s: float
    """Seconds that reading a block takes at least."""


class Tiers(Protocol):
    """What a worker writes its blocks to, and reads them from. One thread calls `put`, and one for each tier calls `get`; the
    rest is for any.
    """

    @property
    def names(self) -> Sequence[str]:
        """The tiers that there are, the faster first."""

    @property
    def num_places(self) -> int:
        """Blocks that the smallest tier can hold."""

    @property
    def reports(self) -> tuple[TierReport, ...]:
        """What the latest `look` found, by tier."""

    def look(self) -> None:
        """Count what lies in the tiers, and let other workers know what was used."""

    def match(self, name: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks lie in this tier, as far as is known."""

    def put(self, blocks: Sequence[TierBlock]) -> None:
        """Write blocks, which nobody writes meanwhile, into each tier that does not have them."""

    def get(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Read blocks of the caller's own from a tier, one for each key. Returns how many of the first ones were had."""

    def reset(self, tenant: str | None) -> int:
        """Erase a tenant's blocks from all tiers, or everybody's. Returns how many.

        Raises UnavailableError if some may be left.
        """

    def close(self) -> None:
        """Let go of the tiers."""


class NodeTiers:
    """The tiers as one rank of a worker sees them: it writes and reads its own share of a block, which is all of it if there is
    no other rank. Counts of blocks are of whole ones.
    """

    def __init__(self, tiers: Mapping[str, _Tier], pool: Tensor, rank: int = 0, num_ranks: int = 1) -> None:
        self._tiers = tiers
        self._rank = rank
        self._num_ranks = num_ranks
        self._going = pool_blocks(pool)
        self._coming = {name: pool_blocks(pool) for name in tiers}
        self._reports: tuple[TierReport, ...] = ()

    @property
    def names(self) -> Sequence[str]:
        """The tiers that there are, the faster first."""
        return list(self._tiers)

    @property
    def num_places(self) -> int:
        """Blocks that the smallest tier can hold."""
        return min(tier.store.num_places for tier in self._tiers.values()) // self._num_ranks

    @property
    def reports(self) -> tuple[TierReport, ...]:
        """What the latest `look` found, by tier."""
        return self._reports

    def look(self) -> None:
        """Count what lies in the tiers, and let other workers know what was used."""
        for tier in self._tiers.values():
            tier.store.note_uses()
        self._reports = tuple(_report(name, tier.store, self._num_ranks) for name, tier in self._tiers.items())

    def match(self, name: str, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks lie in this tier, as far as is known."""
        store, count = self._tiers[name].store, len(keys)
        for rank in range(self._num_ranks):
            if not count or not store.match(self._shares(keys[:1], rank)):
                return 0
            count = min(count, store.match(self._shares(keys, rank)))
        return count

    def put(self, blocks: Sequence[TierBlock]) -> None:
        """Write blocks, which nobody writes meanwhile, into each tier that does not have them."""
        own = self._shares([each.key for each in blocks], self._rank)
        self._going.make_ready()
        for tier in self._tiers.values():
            tier.store.put(
                (key, tenant_of(each.salt), self._going.outgoing(each.place)) for key, each in zip(own, blocks, strict=True)
            )

    def get(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Read blocks of the caller's own from a tier, one for each key. Returns how many of the first ones were had.

        The last one goes first: tiers evict what was used longest ago, and of a prefix that is to be its end.
        """
        tier, coming, count = self._tiers[name], self._coming[name], len(keys)
        over_at, own = time.monotonic() + tier.block_s * count, self._shares(keys, self._rank)
        coming.make_ready()
        for place in reversed(range(len(own))):
            if tier.store.get(own[place], coming.incoming(blocks[place])):
                coming.filled(blocks[place])
            else:
                count = place
        if tier.block_s and (wait_s := over_at - time.monotonic()) > 0:
            time.sleep(wait_s)
        return count

    def reset(self, tenant: str | None) -> int:
        """Erase a tenant's blocks from all tiers, or everybody's. Returns how many.

        Raises UnavailableError if some may be left.
        """
        return sum(tier.store.reset(tenant) for tier in self._tiers.values()) // self._num_ranks

    def close(self) -> None:
        """Let go of the folders."""
        for tier in self._tiers.values():
            tier.store.close()
            if tier.occupied is not None:
                tier.occupied.leave()

    def _shares(self, keys: Sequence[bytes], rank: int) -> Sequence[bytes]:
        """The keys of a rank's shares."""
        return keys if self._num_ranks == 1 else [share_key(key, rank) for key in keys]


def share_key(key: bytes, rank: int) -> bytes:
    """Return the key of what one of several ranks has of a block."""
    return blake2b(key, digest_size=len(key), person=f"rank {rank}".encode()).digest()


def open_tiers(
    config: ClusterConfig,
    pool: Tensor,
    layout: KvLayout,
    arithmetic: str,
    secret: bytes,
    rank: int = 0,
    num_ranks: int = 1,
) -> NodeTiers:
    """Open the tiers of a rank with this pool, as the configuration wants them. `arithmetic` is that of its whole worker. Takes
    seconds where a disk is slow, or where much is left of former clusters.

    Raises ConfigError if a folder can't be used, or is too small.
    """
    wanted, first = config.kv_offloading, rank == 0
    described = _described(config, layout, arithmetic, num_ranks)
    block_bytes = pool_blocks(pool).block_bytes
    tiers: dict[str, _Tier] = {}
    try:
        if wanted.memory_gib is not None:
            folder = memory_folder(secret)
            remove_left()
            size = _file_sizes(config, wanted.memory_gib, block_bytes)
            _check_room(folder, size)
            tiers[MEMORY] = _open(folder, described, block_bytes, size, _block_s(config, MEMORY), first, keep=False)
        if wanted.disk_gib is not None:
            assert wanted.disk_dir is not None, "the loader has seen to it"
            size = _file_sizes(config, wanted.disk_gib, block_bytes)
            tiers[DISK] = _open(Path(wanted.disk_dir), described, block_bytes, size, _block_s(config, DISK), first, keep=True)
        if any(tier.store.num_places < num_ranks for tier in tiers.values()):
            raise ConfigError(f"a tier can't hold the shares that {num_ranks} ranks have of a block", param="kv_offloading")
    except (TandemError, OSError):
        NodeTiers(tiers, pool).close()
        raise
    return NodeTiers(tiers, pool, rank, num_ranks)


def _open(folder: Path, described: bytes, block_bytes: int, size: int, block_s: float, first: bool, *, keep: bool) -> _Tier:
    occupied = Occupied(folder, described, keep=keep) if first else None
    try:
        return _Tier(BlockStore(folder, described, block_bytes, size), occupied, block_s)
    except (TandemError, OSError):
        if occupied is not None:
            occupied.leave()
        raise


def _described(config: ClusterConfig, layout: KvLayout, arithmetic: str, num_ranks: int) -> bytes:
    """What must be equal for blocks to be taken: blocks of another arithmetic would change what is said.

    Of what is as usual nothing is written, so that tiers from before it had a name are kept.
    """
    usual = {"kv_cache_dtype": "auto", "positions": ""}
    values = ((field.name, getattr(layout, field.name)) for field in fields(layout) if field.name != "memory")
    parts = [str(value) for name, value in values if value != usual.get(name)]
    shares = [f"{num_ranks} ranks"] if num_ranks > 1 else []
    return "\n".join([*parts, arithmetic, str(config.block_size), *shares]).encode()


def _file_sizes(config: ClusterConfig, gib: float, block_bytes: int) -> int:
    """Bytes of files for tiers of so many GiB of KV. Those of a paced worker's blocks are few."""
    if config.engine != "paced":
        return int(gib * GIB)
    return load_paced_profile(config.paced_profile).num_blocks(gib, config.block_size) * file_bytes(block_bytes)


def _block_s(config: ClusterConfig, name: str) -> float:
    """Seconds that a block takes by a paced worker's profile; 0 where it is real."""
    if config.engine != "paced":
        return 0.0
    profile = load_paced_profile(config.paced_profile)
    rate = profile.host_bytes_per_s if name == MEMORY else profile.disk_bytes_per_s
    return profile.kv_token_bytes * config.block_size / rate


def _check_room(folder: Path, size: int) -> None:
    """Raise ConfigError if the memory for a tier can't be had. What lies there already is counted as room."""
    shared = folder.parent
    if not shared.is_dir():
        raise ConfigError(f"the memory tier needs {shared}, which is not there", param="kv_offloading.memory_gib")
    space = os.statvfs(shared)
    room = space.f_bavail * space.f_frsize
    if folder.is_dir():
        room = space.f_blocks * space.f_frsize
    if size > room:
        raise ConfigError(
            f"{size / GIB:.1f} GiB of KV do not fit into {shared}, where {room / GIB:.1f} GiB are free; containers get "
            "more by docker's --shm-size, or by a Kubernetes emptyDir with medium: Memory",
            param="kv_offloading.memory_gib",
        )


def _report(name: str, store: BlockStore, num_ranks: int) -> TierReport:
    stats = store.stats
    return TierReport(
        name=name,
        num_blocks=store.num_blocks // num_ranks,
        num_bytes=store.num_bytes,
        stored=stats.stored,
        evicted=stats.evicted,
        damaged=stats.damaged,
        foreign=stats.foreign,
        failed_writes=stats.failed_writes,
        bytes_written=stats.bytes_written,
        bytes_read=stats.bytes_read,
    )
