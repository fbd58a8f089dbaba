"""Whether a request whose attempt has failed may go on elsewhere, and whether it is to blame.

    a worker was lost ─┬─ it died with the request in its hands, and had made nothing of it yet ─► suspected
                       │       └─ again, before any worker decoded a token of it ────────────────► PoisonError
                       └─ anything else ─► innocent: it goes on, unless that happened too often

A prompt that kills does so when it is computed: by prefill before the first token, or by decode before its first frame. A
stream of which the dead worker had decoded tokens is not why it died, however often that happens to it. A suspect is on trial
until a token of it was decoded, and one is at a time (`Trials`): so of many requests that began on a worker when it was
killed, each may be suspected, but the next death convicts the one that was on trial alone.

Where workers die of other things too, a death during a trial proves less. So a router remembers the deaths (`Deaths`): if a
worker died within the last minute that did not have the request in its hands, it takes more of them to convict.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable
from contextlib import asynccontextmanager

from protocol.errors import PoisonError, UnavailableError, WorkerLostError
from protocol.messages import WorkerLife

_DEATHS = 2
"""Of workers, before a token was decoded: that many are no accident."""
_DEATHS_AMONG_OTHERS = 5
"""That many aren't either when workers die without the request, too."""
_MEMORY_S = 60.0
_FAILURES = 3
"""In a row, without a lost worker and without a decoded token."""
_RESUMES = 16
_TOKENS_PER_RESUME = 16
"""A request may go on so often, and once more for so many tokens of its answer: a long one meets more accidents."""


class Deaths:
    """Which lives of workers have ended of late, as far as requests noticed. `now` as in all calls, s."""

    def __init__(self) -> None:
        self._at: dict[WorkerLife, float] = {}

    def note(self, lives: Iterable[WorkerLife], now: float) -> None:
        for life in lives:
            self._at.setdefault(life, now)
        self._at = {life: at for life, at in self._at.items() if now - at < _MEMORY_S}

    def any_but(self, lives: Container[WorkerLife]) -> bool:
        """Whether others than these have, in the minute before the latest note."""
        return any(life not in lives for life in self._at)


class Course:
    """How one request has fared so far."""

    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths
        self._num_resumes = 0
        self._num_failures = 0
        self._suspected_of: set[WorkerLife] = set()

    @property
    def suspected(self) -> bool:
        """A worker died that may have died of this request."""
        return bool(self._suspected_of)

    def decoded(self) -> None:
        """A worker made a token of it: no death and no failure before was its doing."""
        self._num_failures = 0
        self._suspected_of.clear()

    def failed(self, error: UnavailableError, num_emitted: int, killed: WorkerLife | None) -> None:
        """Return if the request may go on elsewhere after this. `killed`: the life that ended with it in its hands.

        Raises PoisonError once too many workers have died of it, `error` itself once it has failed too often.
        """
        self._num_resumes += 1
        self._num_failures += not isinstance(error, WorkerLostError)
        if killed is not None:
            self._suspected_of.add(killed)
        among_others = self._deaths.any_but(self._suspected_of)
        if len(self._suspected_of) >= (_DEATHS_AMONG_OTHERS if among_others else _DEATHS):
            raise PoisonError(
                f"{len(self._suspected_of)} workers died while they computed this request, and no other has made a token of "
                "it since: it is not tried again"
            ) from error
        if self._num_failures == _FAILURES or self._num_resumes > _RESUMES + num_emitted // _TOKENS_PER_RESUME:
            raise error


class Trials:
    """Lets one suspected request at a time be computed."""

    def __init__(self) -> None:
        self._court = asyncio.Lock()

    @asynccontextmanager
    async def held(self, suspected: bool, deadline: float) -> AsyncIterator[Callable[[], None]]:
        """Inside, a suspect is on trial until it calls what it gets, or leaves; others pass.

        Raises UnavailableError if it was not its turn until `deadline` (the loop's time).
        """
        open_trial = suspected

        def acquit() -> None:
            nonlocal open_trial
            if open_trial:
                open_trial = False
                self._court.release()

        if suspected:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._court.acquire()
            except TimeoutError:
                raise UnavailableError("workers died of a request like this; others are tried before it") from None
        try:
            yield acquit
        finally:
            acquit()
