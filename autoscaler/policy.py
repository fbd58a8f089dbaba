"""Which sizes to want, by how many workers were needed lately. Pure.

    need now > wanted                         more at once
    need < wanted for the last `hold_s`       the most that was needed in that time
    one role needs more, the other less       workers go over: the other role's hold is then a quarter as long
    nothing asked for `idle_s`                0, where the range begins there
    a request waits for a role at 0           1, at once

So a size goes down slowly and up at once, and a short lull costs nobody a start. For less than the present size, the needed
number is that of a twentieth more demand: what is near the edge stays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.limits import Sizes, within
from configs.autoscale import SizeRange
from protocol.messages import Role

_FLIP_HOLD = 0.25
_REGRET = 4.0
"""Holds after which a size that grows again is no sign that it shrank too early."""
_MOST_HOLDS = 16
_MOST_NEEDS = 4096


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
    """What each role has needed for a while.

    A size that has to grow again soon after it has shrunk shrank too early: then the role's hold doubles, up to 16 times. In
    the time of as many holds without that it halves.
    """

    def __init__(self, hold_s: float) -> None:
        self._least_s = hold_s
        self._hold_s = dict.fromkeys(Role, hold_s)
        self._changed_at = dict.fromkeys(Role, -math.inf)
        """When a role's hold changed last, or should have."""
        self._shrank_at = dict.fromkeys(Role, -math.inf)
        self._needs: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in Role}

    def sized(self, role: Role, before: int, after: int, now: float) -> None:
        """Note that a size was changed."""
        hold_s = self._hold_s[role]
        if after < before:
            self._shrank_at[role] = now
        elif after > before and now - self._shrank_at[role] < _REGRET * hold_s:
            self._hold_s[role] = min(2 * hold_s, _MOST_HOLDS * self._least_s)
            self._changed_at[role], self._shrank_at[role] = now, -math.inf

    def note(self, role: Role, need: int, now: float) -> None:
        """Note what a role needs. Of needs that a later one exceeds, nobody will ask."""
        if now - self._changed_at[role] > _MOST_HOLDS * self._hold_s[role]:
            self._hold_s[role] = max(self._least_s, self._hold_s[role] / 2)
            self._changed_at[role] = now
        needs = self._needs[role]
        while needs and needs[0][0] <= now - self._hold_s[role]:
            needs.popleft()
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now, need))
        if len(needs) > _MOST_NEEDS:
            needs.popleft()

    def most(self, role: Role, now: float, share: float = 1.0) -> int:
        """The most that a role has needed in this share of the hold."""
        since = now - self._hold_s[role] * share
        return max((need for at, need in self._needs[role] if at > since), default=0)


def decide(
    needs: Mapping[Role, Need],
    holds: Holds,
    present: Sizes,
    ranges: Mapping[Role, SizeRange],
    most: int | None,
    now: float,
    *,
    flips: bool,
    settled: bool,
) -> dict[Role, int]:
    """The sizes to want from now on. `holds` has the needs, those of now among them.

    `flips`: workers can go over to the other role. `settled`: what was wanted last is there; until then nobody is taken away.
    """
    wanted = dict(present)
    for role, need in needs.items():
        if need.workers > present[role]:
            wanted[role] = need.workers
        elif settled and (kept := holds.most(role, now) if need.workers else 0) < present[role]:
            wanted[role] = kept
    wanted = within(wanted, ranges, None)
    for giving in needs:
        more = sum(wanted[role] - present[role] for role in needs if role is not giving)
        spare = wanted[giving] - ranges[giving].clamp(holds.most(giving, now, _FLIP_HOLD))
        if flips and settled and more > 0 and wanted[giving] == present[giving] and spare > 0:
            wanted[giving] -= min(more, spare)
    return within(wanted, ranges, most)
