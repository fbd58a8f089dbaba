"""What prefill workers need not compute of one prompt: what they hold, and what they may fetch from who holds the most. Pure.

    computed ◄── what nobody holds ──┤ fetched ◄── what another worker holds, if that is sooner ──┤ held ◄── own pool

Everything is counted in tokens of computation: fetching n tokens is worth n less what computing would do in the time that it
takes, by what both have taken lately. A way that was never measured costs nothing as far as is known, so it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from router.rules.disaggregation import Costs

_NOT_ASKED_S = 5.0
"""A worker that was asked in vain, and told it late, is not asked again for so long."""


@dataclass(frozen=True)
class Reach:
    """What fetching is worth for one prompt at one moment."""

    source: str | None = None
    """Id of the worker that holds the most of the prompt's beginning; None if nobody is worth asking."""
    tokens: int = 0
    """Tokens at the prompt's beginning that the source holds."""
    fixed: float = 0.0
    """Tokens that could be computed in the time that a fetch takes at least."""
    per_token: float = 0.0
    """Tokens that could be computed in the time that fetching one token takes."""

    @classmethod
    def of(cls, held: Mapping[str, int], at_most: int, costs: Costs | None, not_asked: Container[str]) -> Reach:
        """Who may be asked for what, where `held` says who holds how many tokens, who holds the most first.

        Workers in `not_asked` are not; more than `at_most` tokens are of no use. Without `costs` nobody is asked.
        """
        if costs is None or not costs.there.per_token_s:
            return NO_REACH
        source = next((worker_id for worker_id in held if worker_id not in not_asked), None)
        if source is None:
            return NO_REACH
        per_token_s = costs.there.per_token_s
        tokens = min(held[source], at_most)
        return cls(source, tokens, costs.fetch.fixed_s / per_token_s, costs.fetch.per_token_s / per_token_s)

    def saved(self, own: int) -> int:
        """Tokens' worth of computation that a worker saves that holds `own` tokens itself; never less than those."""
        more = self.tokens - own
        return own if more <= 0 else max(own, self.tokens - round(self.fixed + self.per_token * more))

    def fetches(self, own: int) -> bool:
        """Whether a worker that holds `own` tokens should fetch the others."""
        return self.saved(own) > own


NO_REACH = Reach()


class NotLending(Container[str]):
    """Workers that were asked in vain lately, and that told it late or can't lend to who asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def note(self, worker_id: str, now: float) -> None:
        """Note that nothing came from this worker."""
        self._until = {each: until for each, until in self._until.items() if until > now}
        self._until[worker_id] = now + _NOT_ASKED_S

    def __contains__(self, worker_id: object) -> bool:
        return bool(self._until) and self._until.get(str(worker_id), 0.0) > self._clock()
