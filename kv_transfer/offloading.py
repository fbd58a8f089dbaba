"""The tiers of a worker, if its configuration wants some: only then is the code that reads and writes them imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from configs.schema import ClusterConfig
from kv_transfer.pinning import PinningCache
from protocol.messages import KvLayout

if TYPE_CHECKING:
    from kv_transfer.tiers.worker_tiers import WorkerTiers


def tiers_of(
    config: ClusterConfig,
    pool: Tensor,
    layout: KvLayout,
    arithmetic: str,
    secret: bytes,
    cache: PinningCache,
    *,
    token_s: Callable[[], float],
    on_change: Callable[[], None],
    be_nice: Callable[[], None],
) -> WorkerTiers | None:
    """Open the tiers of the worker whose `pool` and books (`cache`) these are; None where the configuration wants none.

    `token_s` says how many seconds computing a token takes, 0 if that is not known. `on_change` is called when blocks may have
    come free, and `be_nice` lowers the priority of the thread that calls it. Raises ConfigError if a folder can't be used.
    """
    if not config.kv_offloading.wanted:
        return None
    from kv_transfer.tiers.worker_tiers import WorkerTiers

    return WorkerTiers(config, pool, layout, arithmetic, secret, cache, token_s, on_change, be_nice)
