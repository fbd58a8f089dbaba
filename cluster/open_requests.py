"""How many requests still run at all routers, while the cluster ends: they tell again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

RETIRE_ANSWER_S = 10.0
"""Seconds beyond its deadline that the controller has to tell how many requests still run."""
RESTARTED_ANSWER_S = 60.0
"""Seconds that a controller has to answer a question, also one that Ray is just starting again."""
_FRESH_S = 3.0
"""Seconds. A router that has told nothing for so long has ended, and its requests with it."""
_LOOK_S = 0.1


class OpenRequests:
    """The latest that each router has told."""

    def __init__(self, num_routers: Callable[[], Awaitable[int]]) -> None:
        """`num_routers` returns how many routers there are at the moment."""
        self._num_routers = num_routers
        self._told: dict[str, tuple[float, int]] = {}
        """When each router has told how many, on `time.monotonic`."""

    def note(self, router_id: str, count: int) -> None:
        """Note how many requests run at a router."""
        now = time.monotonic()
        self._told = {other: told for other, told in self._told.items() if now - told[0] < _FRESH_S}
        self._told[router_id] = now, count

    async def none_left(self, deadline_s: float) -> int:
        """Wait until every router has told that none runs, or for `deadline_s` seconds. Return how many run."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            number, fresh = await self._num_routers(), self._fresh()
            if len(fresh) >= number and not sum(fresh):
                return 0
            await asyncio.sleep(_LOOK_S)  # also for routers that tell nothing any more, of which no event comes
        return sum(self._fresh())

    def _fresh(self) -> list[int]:
        now = time.monotonic()
        return [count for told, count in self._told.values() if now - told < _FRESH_S]
