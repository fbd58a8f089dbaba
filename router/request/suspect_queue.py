"""Requests that workers may have died of run one at a time, so that the next death tells which of them it was.

    enter ──► WAITS ──it is the shortest──► HAS THE TURN ──a token was decoded, or the attempt is over──► the next has it
                └── waited too long ──► UnavailableError

All that a dead worker had in its hands is suspected: beside a long prompt also short ones that waited for a step between its
chunks. The shortest goes first, so these do not wait for the whole of the long one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.errors import UnavailableError

_GATHER_S = 0.05
"""Seconds from the first suspect to the first turn. The requests of a worker that has died come one after the other."""


@dataclass(eq=False)
class _Suspect:
    num_tokens: int
    called: asyncio.Future[None]


class Turn:
    """The turn of one attempt. It ends with the attempt, or earlier, when a token was decoded."""

    def __init__(self, queue: SuspectQueue | None, waited_s: float) -> None:
        self.waited_s = waited_s
        """Seconds that the attempt waited for other suspects."""
        self._queue = queue

    def cleared(self) -> None:
        """Let the next suspect have its turn, for a token was decoded; idempotent."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.call_next()


class SuspectQueue:
    """The line of a router's suspected requests (`router.rules.retry_policy`). One of them may run."""

    def __init__(self, longest_wait_s: float) -> None:
        """A suspect waits for `longest_wait_s` seconds at most."""
        self._longest_wait_s = longest_wait_s
        self._waiting: list[_Suspect] = []
        self._taken = False
        """One of them has the turn, or is about to get it."""

    @asynccontextmanager
    async def turn(self, suspected: bool, num_tokens: int) -> AsyncIterator[Turn]:
        """Run an attempt that has to compute `num_tokens` inside. A suspect waits for its turn; other requests pass at once.

        Raises UnavailableError if it was not the suspect's turn in time.
        """
        turn = await self._wait(num_tokens) if suspected else Turn(None, 0.0)
        try:
            yield turn
        finally:
            turn.cleared()

    def call_next(self) -> None:
        """Give the turn to the shortest of those that wait; among equals to the one that came first."""
        self._taken = bool(self._waiting)
        if self._waiting:
            suspect = min(self._waiting, key=lambda each: each.num_tokens)
            self._waiting.remove(suspect)
            suspect.called.set_result(None)

    async def _wait(self, num_tokens: int) -> Turn:
        loop = asyncio.get_running_loop()
        began, suspect = loop.time(), _Suspect(num_tokens, loop.create_future())
        self._waiting.append(suspect)
        if not self._taken:
            self._taken = True
            loop.call_later(_GATHER_S, self.call_next)
        try:
            async with asyncio.timeout(self._longest_wait_s):
                await asyncio.shield(suspect.called)  # whoever gives up leaves the line itself
        except BaseException as error:
            if suspect in self._waiting:
                self._waiting.remove(suspect)
            else:
                self.call_next()
            if isinstance(error, TimeoutError):
                raise UnavailableError("workers died of a request like this; others are tried before it") from None
            raise
        return Turn(self, loop.time() - began)
