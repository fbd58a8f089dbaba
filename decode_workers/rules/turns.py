"""Who has a seat in the next steps of a decode worker, when more streams are attached than a step holds. Pure.

Seats are given out for a slice of `SLICE_STEPS` steps, and anew whenever a stream joins or leaves: to change a seat costs
nothing. One seat after the other goes to the tenant that has had the fewest tokens for its weight. This is start-time fair
queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over generated tokens. While two tenants want more seats than they have, their
tokens, each divided by its weight, stay within one slice of each. A tenant with a seat for every stream saves nothing up.

Of the seats of one tenant

- every fourth goes to the stream that has waited longest. So each stream of a tenant with n streams has its turn within 4n
  seats of that tenant, whatever else comes.
- the others go first to young streams, those with the fewest tokens before the others: a short answer is over before it has to
  wait. Then they go to the oldest streams: these end, and free their blocks, soonest. Equal shares for all would let all grow
  at the same time, until the pool holds none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from protocol.share import Share

SLICE_STEPS = 4
"""Steps for which seats are given out. Shorter slices pause a stream for less; each costs a sort of all streams."""
YOUNG_TOKENS = 32
"""Tokens of an answer, from its attach or its return on, during which it goes before its tenant's other streams."""
_ROTATION = 4
"""Of so many seats of a tenant one goes around among all its streams."""


@dataclass(eq=False)
class Turn:
    """One stream as the turns see it. `generated` is brought up to date by whoever asks for an order."""

    ticket_id: int
    share: Share
    generated: int
    """Tokens of the answer so far."""
    begun: int = field(init=False)
    """Tokens of the answer when the stream was attached, or came back after a preemption."""
    charged: int = field(init=False)
    """Tokens of the answer that its tenant was charged for."""
    latest: int | None = None
    """Number of the choice that last gave it a seat, or of the first one that it saw."""

    def __post_init__(self) -> None:
        self.begun = self.charged = self.generated

    @property
    def attained(self) -> int:
        """Tokens since the stream was attached, or came back."""
        return self.generated - self.begun

    @property
    def young(self) -> bool:
        """Whether the stream goes before its tenant's others."""
        return self.attained < YOUNG_TOKENS

    def came_back(self) -> None:
        """Note that the stream has its blocks again after a preemption."""
        self.begun, self.latest = self.generated, None


@dataclass(eq=False)
class _Tenant:
    """The streams of one share. `tag` is the start tag: tokens, divided by the weight."""

    tag: float
    seats: int = 0
    """Number of seats given to it so far."""
    backlogged: bool = False
    """Whether the latest choice left some of its streams without a seat."""
    members: list[Turn] = field(default_factory=list)
    """Oldest first."""


class Turns:
    """The order of the streams of one worker. It keeps what tenants have had while there are more streams than seats."""

    def __init__(self) -> None:
        self._tenants: dict[Share, _Tenant] = {}
        self._virtual = 0.0
        """Lowest start tag of the tenants that want more seats than they have."""
        self._choices = 0

    def clear(self) -> None:
        """Forget what tenants have had: every stream has a seat."""
        self._tenants.clear()

    def leave(self, turn: Turn) -> None:
        """Charge the tenant of a stream that leaves for its last tokens."""
        tenant = self._tenants.get(turn.share)
        if tenant is not None:
            tenant.tag += (turn.generated - turn.charged) / turn.share.strength
            turn.charged = turn.generated

    def order(self, turns: Sequence[Turn], num_seats: int) -> list[Turn]:
        """All of these streams, which are given oldest first; those that get one of the seats come first.

        The rest follows, oldest first: they take the places of streams that can't be computed now.
        """
        self._choices += 1
        self._group(turns)
        self._charge()
        seated: list[Turn] = []
        picks = {share: _picks(tenant) for share, tenant in self._tenants.items()}
        heap = [(tenant.tag, number, share) for number, (share, tenant) in enumerate(self._tenants.items())]
        heapify(heap)
        while heap and len(seated) < num_seats:
            tag, number, share = heap[0]
            turn = next(picks[share], None)
            if turn is None:
                heappop(heap)
                continue
            turn.latest = self._choices
            self._tenants[share].seats += 1
            seated.append(turn)
            heapreplace(heap, (tag + SLICE_STEPS / share.strength, number, share))
        for tenant in self._tenants.values():
            tenant.backlogged = any(turn.latest != self._choices for turn in tenant.members)
        return seated + [turn for turn in turns if turn.latest != self._choices]

    def _group(self, turns: Sequence[Turn]) -> None:
        """Sort the streams by tenant, and forget tenants that have none."""
        starting = not self._tenants
        for tenant in self._tenants.values():
            tenant.members = []
        for turn in turns:
            if starting:
                turn.charged = turn.generated
            if turn.latest is None:
                turn.latest = self._choices - 1
            tenant = self._tenants.setdefault(turn.share, _Tenant(self._virtual))
            tenant.members.append(turn)
        for share, tenant in list(self._tenants.items()):
            if not tenant.members:
                del self._tenants[share]

    def _charge(self) -> None:
        """Charge each tenant for what its streams have generated; those that wanted no more seats catch up."""
        for share, tenant in self._tenants.items():
            for turn in tenant.members:
                tenant.tag += (turn.generated - turn.charged) / share.strength
                turn.charged = turn.generated
        wanting = [tenant.tag for tenant in self._tenants.values() if tenant.backlogged]
        self._virtual = max(self._virtual, min(wanting, default=self._virtual))
        for tenant in self._tenants.values():
            if not tenant.backlogged:
                tenant.tag = max(tenant.tag, self._virtual)


def turn_wait_s(num_streams: int, share: Share, shares: set[Share], num_seats: int, step_s: float) -> float:
    """Longest time in seconds until each of a tenant's `num_streams` streams has had a turn. 0 if each has a seat.

    `shares` are those of all streams that are attached, `step_s` is what a step takes.
    """
    seats = num_seats * share.strength / sum(each.strength for each in shares | {share})
    return 0.0 if num_streams <= seats else _ROTATION * num_streams / seats * SLICE_STEPS * step_s


def _picks(tenant: _Tenant) -> Iterator[Turn]:
    """The streams of one tenant in the order in which they get its seats."""
    members = tenant.members
    by_wait = iter(sorted(members, key=lambda turn: turn.latest or 0))
    young = sorted((turn for turn in members if turn.young), key=lambda turn: turn.attained)
    by_merit = iter(young + [turn for turn in members if not turn.young])
    taken: set[Turn] = set()
    for _ in members:
        lane = by_wait if tenant.seats % _ROTATION == 0 else by_merit
        turn = next(turn for turn in lane if turn not in taken)
        taken.add(turn)
        yield turn
