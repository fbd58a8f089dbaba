"""How a worker's ranks come to the tiers of their node. Without `kv_offloading` none of the code of tiers is imported.

first rank: its own tiers, in a thread ──► TierOpen to the others ──► the worker is built around all of them
other rank: waits to be asked (`TierHost`)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from configs.schema import ClusterConfig
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.first_rank import FirstRank
from engine.runner import Runner

if TYPE_CHECKING:
    from kv_transfer.tiers.gang_tiers import TierHost
    from kv_transfer.tiers.node_tiers import NodeTiers, Tiers


async def opened_tiers(rank: FirstRank) -> Tiers | None:
    """Open the tiers of a worker's node at all of its ranks; None if the configuration wants none. The caller closes them.

    Raises ConfigError if a folder can't be used, or is too small.
    """
    if not rank.config.kv_offloading.wanted:
        return None
    from kv_transfer.tiers.gang_tiers import GangTiers
    from kv_transfer.tiers.node_tiers import open_tiers

    runner, arithmetic, size = rank.runner, rank.me.arithmetic, rank.gang.size
    # In a thread, since the others take a first rank for lost that says nothing for a lease.
    own = await asyncio.to_thread(
        open_tiers, rank.config, runner.pool.data, runner.layout(), arithmetic, rank.secret, num_ranks=size
    )
    if size == 1:
        return own
    tiers = GangTiers(own, rank.gang.askers())
    try:
        await tiers.open_others(arithmetic)
    except BaseException:
        tiers.close()
        raise
    return tiers


def tier_host(config: ClusterConfig, runner: Runner, secret: bytes, rank: int, num_ranks: int) -> TierHost | None:
    """Return what serves the tiers of a rank's node to the worker's first rank; None if the configuration wants none."""
    if not config.kv_offloading.wanted:
        return None
    from kv_transfer.tiers.gang_tiers import TierHost
    from kv_transfer.tiers.node_tiers import open_tiers

    def opened(arithmetic: str) -> NodeTiers:
        return open_tiers(config, runner.pool.data, runner.layout(), arithmetic, secret, rank, num_ranks)

    return TierHost(opened, lambda: be_nice(PREFILL_NICENESS))
