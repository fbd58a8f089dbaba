"""How many workers of each revision there should be next, while one takes the other's place. Pure.

one more of the new, where there is room ──► ready ──► one less of the former ──► gone ──► ...
where there is none: one less of the former ──► gone ──► one more of the new ──► ready ──► ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cluster.pools import Numbers
from protocol.messages import Role

Sizes = Mapping[Role, int]


def canary_workers(target: int, share: float, *, beside: bool) -> int:
    """Number of new workers that a share of the requests takes, of a role that has `target`; at least one.

    Each has as much to do as a former one, whether they come `beside` all of these or take the place of some.
    """
    number = target * (share / (1.0 - share) if beside else share)
    return max(1, math.ceil(round(number, 6)))


def next_sizes(
    targets: Sizes, former: Mapping[Role, Numbers], new: Mapping[Role, Numbers], has_room: Callable[[Role], bool]
) -> tuple[Sizes, Sizes] | None:
    """Numbers of workers that should be wanted of both revisions from now on; None while something is under way, or at the end.

    The role of which the most is left to do goes first, so that both revisions have workers of both roles. `has_room` tells
    whether one more worker of a role can be had.
    """
    roles = [role for role in targets if not _is_done(targets[role], former[role], new[role])]
    if not roles or any(_is_under_way(former[role], new[role]) for role in targets):
        return None
    role = max(roles, key=lambda each: former[each].wanted / targets[each])
    former_sizes = {each: former[each].wanted for each in targets}
    new_sizes = {each: new[each].wanted for each in targets}
    total = former[role].wanted + new[role].wanted
    if total < targets[role] or (total == targets[role] and has_room(role)):
        new_sizes[role] += 1
    else:
        former_sizes[role] -= 1
    return former_sizes, new_sizes


def is_replaced(targets: Sizes, former: Mapping[Role, Numbers], new: Mapping[Role, Numbers]) -> bool:
    """Whether all workers are of the new revision, and ready."""
    return all(
        _is_done(targets[role], former[role], new[role]) and not _is_under_way(former[role], new[role]) for role in targets
    )


def _is_done(target: int, former: Numbers, new: Numbers) -> bool:
    return former.wanted == 0 and new.wanted == target


def _is_under_way(former: Numbers, new: Numbers) -> bool:
    return new.ready < new.wanted or former.present > former.wanted
