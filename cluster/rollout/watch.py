"""Watches one rollout for what has it rolled back: an operator's word, the new workers' ends, and what routers see of them."""

from __future__ import annotations

import asyncio
import time

from cluster.rollout.judge import WorseError, together
from cluster.supervision.supervisor import Supervisor
from protocol.cluster_view import RevisionCounts, RolloutObservation
from protocol.messages.workers import Role

_MOST_ROUTERS = 1024


class RolloutWatch:
    """What is known against one rollout. Each `check` raises WorseError with the reason to roll it back."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.aborted = asyncio.Event()
        """Set once an operator has ended the rollout."""
        self.seen: dict[str, RolloutObservation] = {}
        """The latest of each router."""
        self._lacking: dict[Role, float] = {}
        """Since when a role has no new worker that is ready, or lacks one."""

    def observe(self, seen: RolloutObservation) -> None:
        """Take what a router tells. What is about another rollout is dropped."""
        state = self._supervisor.rollout
        if state is None or seen.revision != state.revision:
            return
        if seen.router_id in self.seen or len(self.seen) < _MOST_ROUTERS:
            self.seen[seen.router_id] = seen

    def counts(self) -> tuple[RevisionCounts, RevisionCounts]:
        """Return what all routers have seen of the former workers and of the new ones."""
        seen = list(self.seen.values())
        return together([each.current for each in seen]), together([each.new for each in seen])

    def check(self, most_ended: int) -> None:
        """Raise WorseError if an operator has ended the rollout, or so many lives of new workers have ended."""
        self.check_aborted()
        _, new = self._supervisor.pools.numbers()
        if sum(each.ended for each in new.values()) >= most_ended:
            errors = [each.last_error for each in new.values() if each.last_error]
            raise WorseError(f"new workers end: {errors[-1] if errors else 'for an unknown reason'}")

    def check_aborted(self) -> None:
        """Raise WorseError if an operator has ended the rollout."""
        if self.aborted.is_set():
            raise WorseError("an operator has ended it")

    def check_present(self) -> None:
        """Raise WorseError if for as long as a start may take a role has had no new worker that is ready, or one too few."""
        pools, now = self._supervisor.pools, time.monotonic()
        _, new = pools.numbers()
        lacking = [role for role, each in new.items() if each.wanted and (not each.ready or each.present < each.wanted)]
        self._lacking = {role: self._lacking.get(role, now) for role in lacking}
        start_s = pools.config.limits.worker_start_s
        for role, since in self._lacking.items():
            if now - since > start_s:
                what = "a new worker is missing" if new[role].ready else "no new worker is left"
                raise WorseError(f"{what}: {role.value} has had {new[role].ready} ready for {start_s:g} s")
