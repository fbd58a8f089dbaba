"""Which streams give their KV blocks back, and how many tokens may be computed again for it. Pure.

Blocks are taken

- for growth: a stream that is about to be computed needs one, and none is free;
- for a newcomer, which waits for a ticket;
- for a return: a stream has waited preempted for too long.

They are taken from the tenant that holds the most for its weight, and there from the youngest stream that is not young in
the sense of `decode_workers.rules.turns`. The oldest stream of the worker gives nothing to one that grows or is new, so
something always goes on. It gives way to one that returns in turn if nobody else is left.

For growth somebody has to give. A newcomer or a returning stream takes from other tenants only as long as these hold more for
their weight than its own tenant will, and from none of a better priority. What it takes from its own tenant is paid from a
budget of tokens that are computed again, so tenants do not keep the worker busy with exchanging their own streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.share import Share

BUDGET_SHARE = 8
"""One token is computed again, beside so many tokens of the chunks that a step may have."""
_BUDGET_STEPS = 128
"""The budget saves up for so many steps."""


@dataclass(frozen=True)
class Holding:
    """What one stream holds, and whether it may be taken."""

    ticket_id: int
    share: Share
    num_blocks: int
    num_tokens: int
    """Tokens whose KV is lost with the blocks, and is computed again when the stream returns."""
    young: bool
    seated: bool
    """Whether the stream has a seat in the present slice."""
    pinned: bool = False
    """Whether its blocks are being sent, so that nobody may take them."""


class RecomputeBudget:
    """Tokens that may be computed again because streams were exchanged: `per_step` more with each step, and saved up for a
    while. A stream of any length may go while something is left; what it costs beyond that is owed.
    """

    def __init__(self, max_chunk_tokens: int) -> None:
        self.per_step = max_chunk_tokens / BUDGET_SHARE
        self._most = self.per_step * _BUDGET_STEPS
        self._left = self._most
        self._step = 0

    def allows(self, step: int) -> bool:
        """Tell whether something is left at this step, by the number of steps since the start."""
        self._left = min(self._most, self._left + (step - self._step) * self.per_step)
        self._step = step
        return self._left > 0

    def spend(self, num_tokens: int) -> None:
        """Note that so many tokens will be computed again."""
        self._left -= num_tokens


def giver_for_growth(holdings: Sequence[Holding]) -> Holding | None:
    """The stream that gives its blocks back so that another one can grow; it may be the one that asks. None if there is none.

    `holdings` are all streams that hold blocks, oldest first.
    """
    for share in _by_load(loads_of(holdings)):
        candidates = _candidates(holdings[1:], share)
        if candidates:
            return next((each for each in candidates if not each.young), candidates[0])
    return None


def givers_for(
    holdings: Sequence[Holding],
    share: Share,
    num_blocks: int,
    missing: int,
    may_take: Callable[[Holding], bool],
    *,
    keep_oldest: bool,
    freed: Callable[[Holding], int] = lambda each: each.num_blocks,
) -> list[Holding]:
    """The streams that give their blocks back for a newcomer or a returning stream. Empty if they would be too few.

    That stream is of this share and gets `num_blocks`, of which `missing` are not free. `may_take` tells which streams of its
    own tenant it may take from. With `keep_oldest` the worker's oldest stream gives nothing. `freed` is asked how many blocks
    come free with each further stream: fewer than it has, where others have some of them, too.
    """
    loads = loads_of(holdings)
    own_load = loads.get(share, 0.0) + num_blocks / share.strength
    takeable = [
        each for each in holdings[keep_oldest:] if not each.young and (each.share.tenant != share.tenant or may_take(each))
    ]
    candidates = {each: _candidates(takeable, each) for each in loads if each.level >= share.level}
    found: list[Holding] = []
    while missing > 0:
        rich = [each for each in _by_load(loads) if each.tenant == share.tenant or loads[each] > own_load]
        giving = [each for each in rich if candidates.get(each)]
        if not giving:
            return []
        giver = candidates[giving[0]].pop(0)
        found.append(giver)
        loads[giver.share] -= giver.num_blocks / giver.share.strength
        missing -= freed(giver)
    return found


def loads_of(holdings: Sequence[Holding]) -> dict[Share, float]:
    """Blocks of each tenant, divided by its weight."""
    loads: defaultdict[Share, float] = defaultdict(float)
    for each in holdings:
        loads[each.share] += each.num_blocks / each.share.strength
    return dict(loads)


def _by_load(loads: Mapping[Share, float]) -> list[Share]:
    """Tenants by what they hold for their weight, the most first."""
    return sorted(loads, key=lambda share: -loads[share])


def _candidates(holdings: Sequence[Holding], share: Share) -> list[Holding]:
    """Streams of this tenant that may have to give, the one that was attached last first."""
    return [each for each in reversed(holdings) if each.share == share and not each.pinned]
