"""Whether a request whose attempt has failed may go on elsewhere, and whether it is what kills workers.

    a worker was lost ─┬─ it died while it computed the request, and had made no token of it yet ─► suspected
                       │       └─ twice more, before any worker decoded a token of it ────────────► PoisonError
                       └─ anything else ─► not suspected: it goes on, unless that happened too often

A prompt that kills does so when it is computed: by prefill before the first token, or by decode before its first frame. A
stream of which the dead worker had decoded tokens is not why it died, however often that happens to it. A suspect is cleared
when a token of it is decoded. Suspects run one at a time until then (`router.request.suspect_queue`): so of many requests that
began on a worker when it died, each may be suspected, but the next death counts against the one that ran alone.

Where workers die of other causes too, a death while a suspect runs proves less. So a router remembers the deaths
(`RecentDeaths`): if a worker died within the last minute that was not computing the request, it takes more of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from protocol.errors import PoisonError, UnavailableError, WorkerLostError
from protocol.messages.workers import WorkerLife

_DEATHS = 3
"""So many workers that died before a token was decoded are no accident. Two can be: where workers die of other causes, a slow
request may meet both of the first deaths, and nobody else has seen one yet."""
_DEATHS_AMONG_OTHERS = 5
"""So many deaths are no accident where workers also die without the request."""
_MEMORY_S = 60.0
_NOT_TRIED_S = 30.0
"""So long a pair is chosen only if there is no other. Each trial costs a request a lease."""
_FAILURES = 3
"""So many failures in a row, without a lost worker and without a decoded token, are the last."""
_RESUMES = 16
_TOKENS_PER_RESUME = 16
"""A request may go on so often, and once more for so many tokens of its answer: a long one meets more accidents."""


class RecentDeaths:
    """The lives of workers that ended within the last minute, as far as requests of this router noticed."""

    def __init__(self) -> None:
        self._at: dict[WorkerLife, float] = {}

    def note(self, deaths: Mapping[WorkerLife, float], now: float) -> None:
        """Remember when these lives have ended, and forget the old ones. All times are in seconds, on one clock."""
        for life, at in deaths.items():
            self._at.setdefault(life, at)
        self._at = {life: at for life, at in self._at.items() if now - at < _MEMORY_S}

    def any_but(self, lives: Container[WorkerLife]) -> bool:
        """Whether a life that is not among `lives` ended within the minute before the latest `note`."""
        return any(life not in lives for life in self._at)


class UnreachedPairs:
    """Pairs of workers between which a handoff came to nothing lately, though the router reaches both."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def note(self, computes: str, decode: str, now: float) -> None:
        """Remember that nothing came from this prefill worker to this decode worker. `now` is in seconds, on one clock."""
        self._until[computes, decode] = now + _NOT_TRIED_S

    def pairs(self, now: float) -> frozenset[tuple[str, str]]:
        """Return those that had better not be tried now, and forget the others."""
        if self._until:
            self._until = {pair: until for pair, until in self._until.items() if until > now}
        return frozenset(self._until)


class RetryPolicy:
    """Decides after each failed attempt of one request whether another attempt may follow."""

    def __init__(self, deaths: RecentDeaths) -> None:
        self._deaths = deaths
        self._num_resumes = 0
        self._num_failures = 0
        self._suspected_of: set[WorkerLife] = set()

    @property
    def suspected(self) -> bool:
        """A worker died that may have died of this request."""
        return bool(self._suspected_of)

    def decoded(self) -> None:
        """A worker decoded a token of the request, so it caused no death and no failure before."""
        self._num_failures = 0
        self._suspected_of.clear()

    def failed(self, error: UnavailableError, num_emitted: int, killed: WorkerLife | None) -> None:
        """Return if the request may go on elsewhere after an attempt that failed with `error`.

        `num_emitted` is the length of its answer so far, in tokens. `killed` is the life that ended while it computed the
        request and had made nothing of it, if one did.

        Raises PoisonError once too many workers have died of the request, `error` itself once it has failed too often.
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
