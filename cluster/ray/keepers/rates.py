"""Who keeps the keys' token buckets for all routers: an actor of the cluster, or Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cluster.ray.actors import start_keeper
from configs.schema import ClusterConfig
from router.access.rates import Buckets, Charge, RateStore
from router.access.redis_rates import RedisRates


class RateKeeper:
    """The actor that keeps the keys' token buckets. When it is started anew, all buckets are full."""

    def __init__(self) -> None:
        self._buckets = Buckets()

    async def take(self, charges: Sequence[Charge]) -> float:
        """Take all charges and return 0, or none of them and return the seconds until all of them could be taken."""
        return self._buckets.take(charges, time.monotonic())


class RayRates:
    """A `router.access.rates.RateStore` over the handle of a RateKeeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    async def take(self, charges: Sequence[Charge]) -> float:
        """Take all charges and return 0, or none of them and return the seconds until all of them could be taken."""
        return float(await self._keeper.take.remote(charges))

    async def close(self) -> None:
        """Do nothing: the actor is the cluster's, and other routers use it."""


def start_rate_keeper(config: ClusterConfig, head_resources: dict[str, float]) -> Any | None:
    """Return the handle of the RateKeeper. None means that nobody has rates, or that Redis keeps their buckets."""
    limited = any(tier.requests_per_minute or tier.tokens_per_minute for tier in config.tiers.values())
    if config.http.redis_url is not None or (config.http.keys_file is None and not limited):
        return None
    return start_keeper(RateKeeper, "rates", head_resources)


def rate_store(config: ClusterConfig, keeper: Any | None) -> RateStore | None:
    """Return the store that a router charges its keys with: Redis, the actor, or None without keys. The router closes it."""
    if config.http.redis_url is not None:
        return RedisRates(config.http.redis_url)
    return None if keeper is None else RayRates(keeper)
