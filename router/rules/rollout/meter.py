"""Counts how the workers of both revisions do while a new configuration is rolled out. Pure.

begin ──► first ──► more ... ──► over        of each attempt: with an end, or after `failed`, or since its client left
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from protocol.cluster_view import RevisionCounts, RolloutObservation
from router.rules.rollout.duration_bins import added, binned

_PACED_TOKENS = 8
"""Tokens after the first one from which on an answer's pace says something."""


@dataclass(eq=False)
class Watched:
    """One attempt at a pair of workers of one revision."""

    revision: int
    began: float
    first_at: float | None = None
    latest_at: float = 0.0
    num_tokens: int = 0
    """Tokens of the answer after the first one."""
    failed: bool = False
    """At these workers, and not because one of them has died."""

    def tokens(self, num_tokens: int, now: float) -> None:
        """Note tokens of the answer."""
        if self.first_at is None:
            self.first_at = now
        else:
            self.num_tokens += num_tokens
        self.latest_at = now

    @property
    def pace_s(self) -> float | None:
        """Mean seconds of a token after the first; None as long as there are few."""
        if self.first_at is None or self.num_tokens < _PACED_TOKENS:
            return None
        return (self.latest_at - self.first_at) / self.num_tokens


class RolloutMeter:
    """What one router sees of one rollout. `revision` is that of the new workers."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self._counts = {True: RevisionCounts(), False: RevisionCounts()}
        """By whether the workers are new."""
        self._running: set[Watched] = set()

    def begin(self, revision: int, now: float) -> Watched:
        """Count an attempt at workers of this revision. It is watched until `over`."""
        watched = Watched(revision, now)
        self._running.add(watched)
        self._add(watched, requests=1)
        return watched

    def over(self, watched: Watched, *, ended: bool) -> None:
        """Count how an attempt is over: `ended` if it came to the answer's end at workers of its revision."""
        if watched not in self._running:
            return  # of a former rollout
        self._running.discard(watched)
        self._add(watched, failures=int(watched.failed))
        if watched.first_at is not None and not watched.failed:
            paces = [watched.pace_s] if ended and watched.pace_s is not None else []
            counts = self._counts[self._is_new(watched)]
            self._counts[self._is_new(watched)] = replace(
                counts,
                first_tokens=added(counts.first_tokens, binned([watched.first_at - watched.began])),
                paces=added(counts.paces, binned(paces)),
            )

    def observation(self, router_id: str, now: float) -> RolloutObservation:
        """All that was seen, with what runs now."""
        return RolloutObservation(router_id, self.revision, self._seen(now, new=False), self._seen(now, new=True))

    def _seen(self, now: float, *, new: bool) -> RevisionCounts:
        counts = self._counts[new]
        running = [each for each in self._running if self._is_new(each) is new]
        firsts = [each.first_at - each.began for each in running if each.first_at is not None]
        return replace(
            counts,
            first_tokens=added(counts.first_tokens, binned(firsts)),
            unanswered=binned(now - each.began for each in running if each.first_at is None),
            running_paces=binned(_known(each.pace_s for each in running)),
        )

    def _add(self, watched: Watched, *, requests: int = 0, failures: int = 0) -> None:
        counts = self._counts[self._is_new(watched)]
        self._counts[self._is_new(watched)] = replace(
            counts, requests=counts.requests + requests, failures=counts.failures + failures
        )

    def _is_new(self, watched: Watched) -> bool:
        return watched.revision == self.revision


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
