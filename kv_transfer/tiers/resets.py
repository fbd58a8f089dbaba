"""A worker's side of an operator's wish to have cached KV erased (`protocol.cache.reset`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from protocol.cache.reset import CacheErased, CacheReset
from protocol.errors import TandemError
from protocol.messages.common import Failed

if TYPE_CHECKING:  # only where tiers are configured are they imported
    from kv_transfer.tiers.worker_tiers import WorkerTiers

log = logging.getLogger(__name__)


class ForgettingCache(Protocol):
    """The books of a pool, as far as they can forget (`engine.memory.prefix_cache`)."""

    def reset(self) -> int:
        """Let go of all cached blocks without an owner, and of pinned ones later. Returns how many went at once."""


class Resets:
    """Erases what one worker and its node keep. `send` takes a peer's wire identity and a message; `spawn` runs a task for as
    long as the worker.
    """

    def __init__(
        self,
        cache: ForgettingCache,
        tiers: WorkerTiers | None,
        send: Callable[[bytes, Any], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._cache = cache
        self._tiers = tiers
        self._send = send
        self._spawn = spawn
        self._turn = asyncio.Lock()

    def ask(self, router: bytes, message: CacheReset) -> None:
        """Take a CacheReset. It is answered when it is done."""
        self._spawn(self._reset(router, message))

    async def _reset(self, router: bytes, message: CacheReset) -> None:
        """One at a time. What is being written ends before anything is erased, and what the pool lets go is not written."""
        answer: CacheErased | Failed
        try:
            async with self._turn:
                if self._tiers is not None:
                    await self._tiers.write_nothing()
                forgotten = self._cache.reset()
                erased = 0 if self._tiers is None else await self._tiers.reset(message.tenant)
            answer = CacheErased(message.call_id, forgotten, erased)
        except TandemError as error:
            log.warning("cached KV was not erased: %s", error.message)
            answer = Failed.from_error(message.call_id, error)
        self._send(router, answer)
