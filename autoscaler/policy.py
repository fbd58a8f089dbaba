"""Which sizes to want, by how many workers were needed lately. Pure.

    need now > wanted                         more at once
    need < wanted for a hold                  the most that was needed in that time
    one role needs more, the other less       workers go over: the other role's hold is then a quarter as long
    nothing asked for `idle_s`                0, where the range begins there
    a request waits for a role at 0           1, at once

A hold lasts as long as a start, and `hold_s` at most. A worker that nobody needs has then cost what it costs to start it again.
So whatever comes next, this is at most twice what somebody would pay who knew it (the rule for renting or buying skis).
For less than the present size, the needed number is that of a demand that takes half a worker more, or a little more than half
where there are many. So near the edge of a size, demand that goes up and down does not make the size do so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaler.limits import Budget, Sizes, within
from configs.autoscale import SizeRange
from protocol.messages.workers import Role

_FLIP_HOLD = 0.25
_MOST_NEEDS = 4096
_SPARE, _SPARE_POWER = 0.5, 0.2
"""A smaller size must have so much of a worker to spare, times the number of workers to this power: an error of a large demand
is a larger part of a worker."""


@dataclass(frozen=True)
class Need:
    """How many workers of a role the demand needs."""

    workers: int
    """Now, or within the time that a start takes. 0: nothing was asked for long enough."""
    to_keep: int
    """The same with some more demand: no fewer are kept."""
    reason: str
    """Why so many, in words."""


class Holds:
    """What each role has needed for a while, `longest_s` seconds at most."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._needs: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in Role}

    def note(self, role: Role, need: int, now: float) -> None:
        """Note what a role needs. Of needs that a later one exceeds, nobody will ask."""
        needs = self._needs[role]
        while needs and needs[0][0] <= now - self._longest_s:
            needs.popleft()
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now, need))
        if len(needs) > _MOST_NEEDS:
            needs.popleft()

    def most(self, role: Role, now: float, hold_s: float) -> int:
        """The most that a role has needed in the latest `hold_s` seconds."""
        return max((need for at, need in self._needs[role] if at > now - hold_s), default=0)


def with_spare(workers: int) -> float:
    """So many times the demand that needs this many workers is what a size must be enough for, to be a smaller one."""
    return 1 + _SPARE * math.pow(max(1, workers), _SPARE_POWER - 1)


def decide(
    needs: Mapping[Role, Need],
    holds: Holds,
    present: Sizes,
    ranges: Mapping[Role, SizeRange],
    budgets: Sequence[Budget],
    now: float,
    *,
    hold_s: float,
    flips: bool,
    settled: bool,
) -> dict[Role, int]:
    """The sizes to want from now on. `holds` has the needs, those of now among them.

    `hold_s`: for so long fewer workers must have been enough. `flips`: workers can go over to the other role. `settled`: what
    was wanted last is there; until then nobody is taken away.
    """
    wanted = dict(present)
    for role, need in needs.items():
        if need.workers > present[role]:
            wanted[role] = need.workers
        elif settled and (kept := holds.most(role, now, hold_s) if need.workers else 0) < present[role]:
            wanted[role] = kept
    wanted = within(wanted, ranges)
    for giving in needs:
        more = sum(wanted[role] - present[role] for role in needs if role is not giving)
        spare = wanted[giving] - ranges[giving].clamp(holds.most(giving, now, _FLIP_HOLD * hold_s))
        if flips and settled and more > 0 and wanted[giving] == present[giving] and spare > 0:
            wanted[giving] -= min(more, spare)
    return within(wanted, ranges, budgets)
