"""Shortens a chat that is too long (`truncation: "auto"`) by its oldest turns, as few as it takes. Pure.

    system   user assistant   user assistant tool assistant   user   assistant tool   assistant tool
    stays    ────turn 1────   ───────────turn 2──────────     stays  ───round 1────   ────stays────

A turn is a user's message and all up to the next user's, so a call of a tool and its result go together, and what is left
still begins with a user. The last user's message stays. What follows it goes in rounds, an assistant's message and the
results of the tools that it calls; the last round stays too, for it is what is to be answered. Messages of the system or a
developer stay wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_STAYING = ("system", "developer")


@dataclass(frozen=True)
class Truncated:
    """What is left of a chat, as a prompt."""

    token_ids: list[int]
    num_dropped: int
    """Number of messages that were left out."""


def truncated(roles: Sequence[str], render: Callable[[Sequence[int]], list[int]], max_tokens: int) -> Truncated | None:
    """Return the chat of messages with these roles, cut to `max_tokens`; None if dropping all that may go is not enough.

    `render` gives the tokens of the messages with the given indices. It is called once for each halving of the number of
    turns, and on ever shorter chats if much has to go. At least one turn is dropped: call it for a chat that is too long.
    """
    units = turns(roles)
    if not units:
        return None

    def without(num_units: int) -> Truncated:
        gone = {index for unit in units[:num_units] for index in unit}
        return Truncated(render([index for index in range(len(roles)) if index not in gone]), len(gone))

    too_few, enough = 0, len(units)
    best = without(enough)
    if len(best.token_ids) > max_tokens:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        tried = without(middle)
        if len(tried.token_ids) <= max_tokens:
            enough, best = middle, tried
        else:
            too_few = middle
    return best


def turns(roles: Sequence[str]) -> list[list[int]]:
    """Return the indices of the messages that may go, in the order in which they do. Those of an inner list go together."""
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
    earlier = _groups(roles, range(last_user), "user")
    rounds = _groups(roles, range(last_user + 1, len(roles)), "assistant")
    return earlier + rounds[:-1]


def _groups(roles: Sequence[str], indices: range, first_role: str) -> list[list[int]]:
    """Cut before every message of `first_role`; what precedes the first one is a group too."""
    groups: list[list[int]] = []
    for index in indices:
        if roles[index] in _STAYING:
            continue
        if roles[index] == first_role or not groups:
            groups.append([])
        groups[-1].append(index)
    return groups
