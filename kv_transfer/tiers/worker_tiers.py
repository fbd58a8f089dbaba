"""One worker and its node's tiers: what it writes, what it reads, and what it erases. Made only where tiers are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from configs.schema import ClusterConfig
from kv_transfer.pinning import PinningCache
from kv_transfer.tiers.node_tiers import Tiers
from kv_transfer.tiers.offload import Offload
from kv_transfer.tiers.reader import TierReader
from protocol.messages.load import TierReport


class WorkerTiers:
    """Owns the tiers, which are open. Run beside the worker's steps, and closed with it."""

    def __init__(
        self,
        tiers: Tiers,
        config: ClusterConfig,
        cache: PinningCache,
        token_s: Callable[[], float],
        on_change: Callable[[], None],
        be_nice: Callable[[], None],
    ) -> None:
        """`cache` has the worker's books. `token_s` says how long computing a token takes, `on_change` is called when blocks
        were unpinned, and `be_nice` lowers the priority of the thread that calls it.
        """
        self._tiers = tiers
        self._offload = Offload(cache, tiers, config.limits.lease_s, on_change, be_nice)
        self.reader = TierReader(tiers, config.block_size, token_s, config.limits.lease_s / 2)

    @property
    def reports(self) -> tuple[TierReport, ...]:
        """What lies in the tiers, about a second ago."""
        return self._tiers.reports

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to be written."""
        return self._offload.num_waiting

    def note(self, keys: Sequence[bytes], salt: str) -> None:
        """Note that a prompt or stream of this salt is over whose full blocks have these keys."""
        self._offload.note(keys, salt)

    async def write_nothing(self) -> None:
        """Write none of the blocks that wait to be written; returns when none is being written any more.

        Raises UnavailableError if that takes too long.
        """
        await self._offload.forget()

    async def reset(self, tenant: str | None) -> int:
        """Erase a tenant's blocks, or everybody's. Returns how many. Raises UnavailableError if some may be left."""
        return await asyncio.to_thread(self._tiers.reset, tenant)

    async def run(self) -> None:
        """Write blocks to the tiers until cancelled."""
        await self._offload.run()

    def close(self) -> None:
        """Let go of the folders. `run` is over."""
        self.reader.close()
        self._tiers.close()
