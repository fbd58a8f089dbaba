"""KV blocks of a decode worker's streams: who grows, who is preempted, who comes back, and for whom room is made.

    a stream grows ──no block is free──► another one is preempted        a newcomer was refused ──► some are preempted for it
    preempted ──enough blocks are free──► it comes back      ──it has waited for half of `turn_s`──► others are preempted for it
                                                 nobody may give any: no newcomer takes what comes free ◄──┘

`decode_workers.rules.preemption` decides who gives blocks back. All of it happens between two steps. A newcomer is a Reserve
that found too few free blocks. What was made free for it is kept for a while: its router asks again when it hears of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from decode_workers.attached_tickets import AttachedTickets
from decode_workers.ledger import Ledger
from decode_workers.rules.preemption import Holding, RecomputeBudget, giver_for_growth, givers_for, loads_of
from decode_workers.stream import Stream
from decode_workers.ticket_blocks import Cost
from protocol.share import Share

_KEPT_S = 1.0
"""Seconds for which room is kept for a newcomer that was refused. Its router looks again at the next load report."""
_MARGIN = 8
"""Beside a newcomer for which others gave their blocks, and beside a stream that returns in turn, one block stays free for so
many streams of a step."""


@dataclass(frozen=True)
class _Kept:
    """Blocks that are free for a newcomer, because others gave some or would have to."""

    share: Share
    cost: Callable[[], Cost]
    """What the newcomer takes at any moment: that changes with what others own of the blocks that it shares."""
    until: float
    """Time on the worker's clock."""

    def blocks_now(self) -> int:
        """How many blocks that are. Looks at every block of the newcomer's prompt."""
        return self.cost().num_blocks


class Room:
    """The blocks of all streams of one worker. `streams` are the attached ones, oldest first, as they come and go."""

    def __init__(
        self,
        ledger: Ledger,
        attached: AttachedTickets,
        streams: Mapping[int, Stream],
        max_batch_size: int,
        max_chunk_tokens: int,
        turn_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._attached = attached
        self._streams = streams
        self._max_batch_size = max_batch_size
        self._turn_s = turn_s
        self._clock = clock
        self._budget = RecomputeBudget(max_chunk_tokens)
        self._preempted: dict[int, Stream] = {}
        """By ticket; the one that has waited longest comes first."""
        self._wanted: tuple[Share, int, Callable[[], Cost]] | None = None
        """What a newcomer was refused since the latest step began: blocks, and what they take of the pool at any moment."""
        self._kept: _Kept | None = None
        self._due_ticket: int | None = None
        """The preempted stream that has waited long enough to take the place of others, when nobody may give any."""
        self.preemptions = 0

    @property
    def num_preempted(self) -> int:
        """Number of streams that wait for blocks."""
        return len(self._preempted)

    @property
    def waits(self) -> bool:
        """Whether a stream or a newcomer waits for blocks."""
        return bool(self._preempted) or self._wanted is not None or self._kept is not None

    @property
    def reservable_blocks(self) -> int:
        """Number of blocks that a new ticket may take while nobody gives any."""
        return max(0, self._ledger.blocks.num_free - self._spare)

    def remove(self, ticket_id: int) -> None:
        """Forget a stream that has left. Idempotent."""
        self._preempted.pop(ticket_id, None)

    def has_slots(self, stream: Stream, end: int) -> bool:
        """Tell whether the stream has slots for its tokens up to `end`, after others had to make room if need be."""
        while not self._attached.grow(stream.ticket_id, end, stream.computed):
            giver = giver_for_growth(self._holdings())
            if giver is None:
                return False
            self._preempt([giver])
            if giver.ticket_id == stream.ticket_id:
                return False
        return True

    def draft_slots(self, stream: Stream, most: int) -> int:
        """Return how many slots behind its newest token the stream has for drafts, up to `most`. Nobody gives way for them, and
        no block is taken that others may want soon.
        """
        held = self._attached.slots_behind(stream.ticket_id, len(stream.token_ids))
        if held >= most or self.waits:
            return min(held, most)
        spare = self._spare
        while held < most and self._ledger.blocks.num_free > spare:
            self._attached.grow(stream.ticket_id, len(stream.token_ids) + held + 1)
            held = self._attached.slots_behind(stream.ticket_id, len(stream.token_ids))
        return min(held, most)

    def settle(self, step: int) -> Stream | None:
        """Make room for a newcomer, and let one preempted stream come back, which is returned. Called between two steps.

        `step` is the number of steps since the start.
        """
        if self._kept is not None and self._clock() > self._kept.until:
            self._kept = None
        if self._wanted is not None:
            self._make_room(*self._wanted, step)
            self._wanted = None
        if self._preempted and not any(stream.recomputing for stream in self._streams.values()):
            return self._next_back() or self._longest_back(step)
        return None

    # -- newcomers ---------------------------------------------------------------------------------------------------

    def wait_s(self, share: Share, step_s: float) -> float:
        """Longest time in seconds until this tenant's preempted streams have come back, if a step takes `step_s`."""
        tokens = sum(len(stream.token_ids) for stream in self._preempted.values() if stream.share == share)
        return tokens / self._budget.per_step * step_s

    def spare_beside(self, share: Share, *, displaces: bool) -> int:
        """Number of blocks that have to stay free beside a new ticket of this tenant.

        `displaces`: others may have made room for it.
        """
        kept = self._kept
        if kept is not None and self._clock() > kept.until:
            kept = None  # nobody calls `settle` while there is nothing to compute
        if kept is not None and displaces and kept.share == share:
            return self._margin
        return self._spare + self._due_before(share) + (0 if kept is None else kept.blocks_now())

    def _due_before(self, share: Share) -> int:
        """Blocks that a stream waits for which nobody can give now, if what comes free is for it before this tenant's tickets:
        it may be short answers that hold the others, and come without end.
        """
        stream = None if self._due_ticket is None else self._preempted.get(self._due_ticket)
        if stream is None or share.level < stream.share.level:
            return 0
        num_blocks, loads = self._ledger.blocks.at_once(len(stream.token_ids)), loads_of(self._holdings())
        own_load = loads.get(stream.share, 0.0) + num_blocks / stream.share.strength
        if share.tenant != stream.share.tenant and loads.get(share, 0.0) <= own_load:
            return 0
        return self._attached.return_cost(stream.ticket_id, len(stream.token_ids), stream.known).num_blocks

    def holds_most(self, share: Share) -> bool:
        """Tell whether this tenant holds more for its weight than any other: it has to wait for its own streams."""
        loads = loads_of(self._holdings())
        return max(loads, key=lambda each: loads[each], default=None) == share

    def want(self, share: Share, num_blocks: int, cost: Callable[[], Cost]) -> None:
        """Note that a newcomer was refused so many blocks: the next `settle` makes room for it, if somebody has to give.

        `cost` says what they take of the pool by then: what was cached of them may be gone.
        """
        self._wanted = share, num_blocks, cost

    def granted(self, share: Share) -> None:
        """Note that a newcomer of this tenant has got its blocks."""
        if self._kept is not None and self._kept.share == share:
            self._kept = None

    def _make_room(self, share: Share, num_blocks: int, cost: Callable[[], Cost], step: int) -> None:
        """Keep room for a newcomer if others have to give it some. They do so as far as it is not free already."""
        now = cost()
        missing = now.num_blocks + self._margin - self._ledger.blocks.num_free
        own = self._budget.allows(step)
        givers = givers_for(
            self._holdings(),
            share,
            num_blocks,
            max(1, missing),
            lambda each: own and not each.seated,
            keep_oldest=True,
            freed=self._freed(now),
        )
        if not givers:
            return
        self._kept = _Kept(share, cost, self._clock() + _KEPT_S)
        if missing > 0:
            self._budget.spend(sum(each.num_tokens for each in givers if each.share.tenant == share.tenant))
            self._preempt(givers)

    # -- preempted streams -------------------------------------------------------------------------------------------

    def _next_back(self) -> Stream | None:
        """The oldest preempted stream of the tenant that holds the least, if there is room for it beside everybody's growth."""
        holdings, spare = self._holdings(), self._spare
        if self._kept is not None and holdings:  # otherwise nothing would go on
            spare += self._kept.blocks_now()
        loads = loads_of(holdings)
        shares = {stream.share for stream in self._preempted.values()}
        share = min(shares, key=lambda share: (loads.get(share, 0.0), share.tenant, share.weight))
        oldest = next(stream for stream in self._streams.values() if stream.preempted and stream.share == share)
        return self._back(oldest, spare)

    def _longest_back(self, step: int) -> Stream | None:
        """The stream that has waited longest, if it has waited long enough to take the place of others."""
        stream = next(iter(self._preempted.values()))
        if self._clock() - stream.preempted_at < self._turn_s / 2 or not self._budget.allows(step):
            return None
        num_blocks = self._ledger.blocks.at_once(len(stream.token_ids))
        cost = self._attached.return_cost(stream.ticket_id, len(stream.token_ids), stream.known)
        missing = cost.num_blocks + self._margin - self._ledger.blocks.num_free
        givers = givers_for(
            self._holdings(), stream.share, num_blocks, missing, lambda each: True, keep_oldest=False, freed=self._freed(cost)
        )
        if missing > 0 and not givers:
            self._due_ticket = stream.ticket_id
            return None
        self._preempt(givers)
        back = self._back(stream, 0)
        if back is not None:
            self._budget.spend(stream.remaining)
        return back

    def _back(self, stream: Stream, spare: int) -> Stream | None:
        cached = self._attached.readmit(stream.ticket_id, len(stream.token_ids), stream.known, spare)
        if cached is None:
            return None
        stream.computed = cached
        stream.turn.came_back()
        del self._preempted[stream.ticket_id]
        self._due_ticket = None
        return stream

    def _freed(self, cost: Cost) -> Callable[[Holding], int]:
        """Says of one stream after the other how many blocks come free for what takes this much."""
        freed = self._attached.freeing(cost.shared)
        return lambda each: freed(each.ticket_id)

    def _preempt(self, givers: Sequence[Holding]) -> None:
        for giver in givers:
            stream = self._streams[giver.ticket_id]
            self._attached.keep(stream.ticket_id, stream.token_ids, stream.computed)
            self._attached.preempt(stream.ticket_id)
            stream.preempted_at = self._clock()
            self._preempted[stream.ticket_id] = stream
            self.preemptions += 1

    def _holdings(self) -> list[Holding]:
        """What streams hold, the oldest first."""
        return [stream.holding for stream in self._streams.values() if not stream.preempted]

    @property
    def _spare(self) -> int:
        """One block for each stream that may want one soon: all of one step, or all that hold some."""
        return min(self._ledger.num_holders, self._max_batch_size)

    @property
    def _margin(self) -> int:
        return -(-self._spare // _MARGIN)
