"""Requests that workers may have died of run one at a time, so that the next death tells which of them it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocol.errors import UnavailableError


class SuspectQueue:
    """The line of a router's suspected requests (`router.rules.retry_policy`). The one at its front may run."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, suspected: bool, deadline: float) -> AsyncIterator[Callable[[], None]]:
        """Run an attempt inside. A suspect waits until no other one runs; other requests pass at once.

        Gives a function to call when a token was decoded. It clears the suspect, and the next one may run; leaving does, too.

        Raises UnavailableError if it was not the suspect's turn until `deadline` (the loop's time).
        """
        holds_turn = suspected

        def cleared() -> None:
            nonlocal holds_turn
            if holds_turn:
                holds_turn = False
                self._running.release()

        if suspected:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._running.acquire()
            except TimeoutError:
                raise UnavailableError("workers died of a request like this; others are tried before it") from None
        try:
            yield cleared
        finally:
            cleared()
