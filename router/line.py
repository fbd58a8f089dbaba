"""The line in which requests wait for room: first come, first served, so that a big request is not passed by small ones.

IN LINE ──► AT THE FRONT ──► out      one at a time is at the front; it alone looks for room, the rest sleep
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.errors import OverloadedError

_WEIGHT = 0.2
"""Of the latest gap in the moving average of gaps."""
_LONGEST_RETRY_S = 60.0


@dataclass(eq=False)
class _Place:
    called: asyncio.Future[None]
    ahead: bool


class WaitingLine:
    """At most `limit` requests; more are refused at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: list[_Place] = []
        self._gap_s = 1.0
        self._left_at: float | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def retry_after_s(self) -> float:
        """When a newcomer would come to the front, from the pace at which the line moved lately: 1 to 60 s."""
        return min(max(1.0, len(self._places) * self._gap_s), _LONGEST_RETRY_S)

    @asynccontextmanager
    async def turn(self, deadline: float, *, ahead: bool = False) -> AsyncGenerator[None, None]:
        """Wait to be at the front, and be there while inside. `ahead` goes before all others that wait (a resumed stream).

        Raises OverloadedError at once if the line is too long, TimeoutError at `deadline` (the loop's time).
        """
        if len(self._places) >= self._limit and not ahead:
            raise OverloadedError(
                f"{len(self._places)} requests are waiting already; try again later", retry_after_s=self.retry_after_s
            )
        place = _Place(asyncio.get_running_loop().create_future(), ahead)
        # Whoever is at the front stays there, and those that were put ahead before keep their order.
        behind = sum(other.ahead for other in self._places[1:]) + 1 if ahead else len(self._places)
        self._places.insert(behind, place)
        self._call_first()
        try:
            async with asyncio.timeout_at(deadline):
                await place.called
            yield
            self._measure()
        finally:
            self._places.remove(place)
            self._call_first()

    def _call_first(self) -> None:
        if self._places and not self._places[0].called.done():
            self._places[0].called.set_result(None)

    def _measure(self) -> None:
        """Someone found room: note how long ago the one before did, while others were waiting all along."""
        now = asyncio.get_running_loop().time()
        if self._left_at is not None:
            self._gap_s += _WEIGHT * (now - self._left_at - self._gap_s)
        self._left_at = now if len(self._places) > 1 else None
