"""How many workers of each revision there should be next, while one takes the other's place. Pure.

one more of the new, where there is room ──► ready ──► one less of the former ──► gone ──► ...
where there is none: one less of the former ──► gone ──► one more of the new ──► ready ──► ...
when the last former one is gone: all of the new
back: the former, where there is room beside one of the new ──► ready ──► none of the new
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cluster.pools.pools import CheckRoom
from cluster.pools.revisions import Numbers
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role

Sizes = Mapping[Role, int]


def canary_workers(target: int, share: float, *, beside: bool) -> int:
    """Number of new workers that a share of the requests takes, of a role that has `target`; at least one.

    Each has as much to do as a former one, whether they come `beside` all of these or take the place of some.
    """
    number = target * (share / (1.0 - share) if beside else share)
    return max(1, math.ceil(round(number, 6)))


def first_sizes(targets: Sizes, present: Sizes, share: float, check_room: CheckRoom) -> tuple[Sizes, Sizes]:
    """Numbers of former and of new workers with which a rollout begins, where so many former ones are `present`.

    Raises InvalidRequestError if there is no room for a new one, and no former one of its role can go.
    """
    sizes, former, new = dict(targets), dict(targets), dict.fromkeys(targets, 0)
    for role, target in targets.items():
        new[role] = canary_workers(target, share, beside=True)
        try:
            check_room({**sizes, role: target + new[role]}, [role])
            sizes[role] += new[role]
        except InvalidRequestError:
            new[role] = canary_workers(target, share, beside=False)
            former[role] = min(target, present[role]) - new[role]  # one that is missing leaves no room when it goes
            if former[role] < 1:
                raise
    return former, new


def next_sizes(
    targets: Sizes, former: Mapping[Role, Numbers], new: Mapping[Role, Numbers], has_room: Callable[[Role], bool]
) -> tuple[Sizes, Sizes] | None:
    """Numbers of workers that should be wanted of both revisions from now on; None while something is under way, or at the end.

    The role of which the most is left to do goes first, so that both revisions have workers of both roles. `has_room` tells
    whether one more worker of a role can be had. When no former worker is left, all new ones are wanted at once.
    """
    if not any(each.wanted or each.present for each in former.values()):
        none = dict.fromkeys(targets, 0)
        return None if all(new[role].wanted == targets[role] for role in targets) else (none, targets)
    roles = [role for role in targets if not _is_done(targets[role], former[role], new[role])]
    if not roles or any(_is_under_way(former[role], new[role]) for role in targets):
        return None
    role = max(roles, key=lambda each: former[each].wanted / targets[each])
    former_sizes = {each: former[each].wanted for each in targets}
    new_sizes = {each: new[each].wanted for each in targets}
    total = former[role].wanted + new[role].wanted
    # A former worker that goes leaves no room if it was missing, so there may be none though some have gone.
    if not former[role].wanted or (total <= targets[role] and has_room(role)):
        new_sizes[role] += 1
    else:
        former_sizes[role] -= 1
    return former_sizes, new_sizes


def sizes_back(
    targets: Sizes,
    former: Mapping[Role, Numbers],
    new: Mapping[Role, Numbers],
    fits: Callable[[Sizes], bool],
    *,
    late: bool,
) -> tuple[Sizes, Sizes]:
    """Numbers of workers that should be wanted of both revisions from now on, on the way back to the former one.

    One new worker of each role serves until a former one of each role is ready, unless it is `late`, or that new one has the
    only room for a former one. `fits` tells whether there is room for so many workers of both revisions.
    """
    serving = all(former[role].ready for role in targets)
    former_sizes = {role: former[role].wanted for role in targets}
    new_sizes = {role: 0 if serving or late else min(1, new[role].wanted, new[role].ready) for role in targets}
    taken = {role: max(former[role].wanted, former[role].present) + new[role].present for role in targets}
    while fitting := [
        role for role in targets if former_sizes[role] < targets[role] and fits({**taken, role: taken[role] + 1})
    ]:
        role = min(fitting, key=lambda each: former_sizes[each] / targets[each])
        former_sizes[role] += 1
        taken[role] += 1
    moves = any(
        former_sizes[role] > former[role].wanted
        or new_sizes[role] < new[role].present
        or former[role].present > min(former[role].wanted, former[role].ready)
        for role in targets
    )
    if not moves:
        stuck = [role for role in targets if not former[role].present and not fits({**taken, role: new[role].present + 1})]
        serving_yet = [role for role in targets if new_sizes[role]]
        if stuck and serving_yet:
            new_sizes[min(serving_yet, key=lambda role: role not in stuck)] = 0
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
