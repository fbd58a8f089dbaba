"""The tickets in the batch: how one joins it, which blocks it gets and loses there, and what uses them. Pure Python.

    attach, attach_here ──► WITH BLOCKS: grow, keep ──preempt──► WITHOUT ──readmit──► WITH BLOCKS ...  until `Ledger.release`
                              └── begin_step .. end_step, begin_send .. end_send: in use, not to be preempted

An attached ticket grows with its answer; the scheduler may preempt it, which takes all its blocks, and readmit it later. It
stays ATTACHED throughout. Who calls knows that the ticket is attached, which is asserted; `attach`, `attach_here` and `want`
alone are safe to call late, twice or for an unknown ticket.

Who frees: the ledger, when a ticket is final and nothing uses its blocks (`Ledger.settle`). Of a ticket that stays, `preempt`
gives all blocks back, and `grow` those that nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from decode_workers.ledger import Ledger
from decode_workers.ticket_blocks import Cost
from decode_workers.ticket_entry import TicketEntry
from protocol.cache.keys import more_keys
from protocol.ticket import TicketState


class AttachedTickets:
    """The attached tickets of a ledger, which has their entries."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._blocks = ledger.blocks
        self._tables = ledger.blocks.tables
        self._block_size = ledger.blocks.block_size
        self.cache_queries = 0
        """Prompt tokens of the tickets that were attached: others were copies, or came to nothing."""
        self.cache_hits = 0
        """Those of them that were held."""

    def attach(self, ticket_id: int) -> TicketEntry | None:
        """Hand a committed ticket to the batch. None if it is not committed."""
        entry = self._ledger.find(ticket_id)
        if entry is None or entry.state is not TicketState.COMMITTED:
            return None
        return self._attach(entry)

    def attach_here(self, ticket_id: int) -> TicketEntry | None:
        """Hand a ticket to the batch for which nothing was sent: what is not held of its prompt is computed here.

        Returns None if it is not reserved, or if it can't be computed here (`computable`).
        """
        entry = self._ledger.find(ticket_id)
        if entry is None or entry.state is not TicketState.RESERVED or not self.computable(entry):
            return None
        return self._attach(entry)

    def computable(self, entry: TicketEntry) -> bool:
        """Whether the prompt of a reserved ticket can be computed here: some is not held, and what is seen from there on is."""
        missing = entry.held_tokens < len(entry.token_ids)
        return missing and entry.block_table.first <= self._tables.first_block(entry.held_tokens)

    def grow(self, ticket_id: int, num_tokens: int, computed: int = 0) -> bool:
        """Extend an attached ticket's blocks to cover `num_tokens`. False, and no block is taken, if too few are free.

        Called between two steps. Blocks that nobody reads when the first `computed` tokens have been computed are given back.
        """
        entry = self._attached(ticket_id)
        if not entry.sending:
            kept_from = self._blocks.window.kept_from(computed)
            if entry.wanted_from is not None:
                kept_from = min(kept_from, entry.wanted_from)
            self._tables.give_up(entry.block_table, kept_from // self._block_size, entry.keys)
        length = self._blocks.holding(num_tokens)
        missing = length - len(entry.block_table)
        return missing <= 0 or (missing <= self._blocks.num_free and self._tables.lengthen(entry.block_table, length))

    def begins_at(self, ticket_id: int) -> int:
        """Position of the first token whose KV an attached ticket has."""
        return self._attached(ticket_id).block_table.first * self._block_size

    def slots_behind(self, ticket_id: int, num_tokens: int) -> int:
        """Number of slots that an attached ticket's blocks have behind so many tokens, which they hold."""
        return len(self._attached(ticket_id).block_table) * self._block_size - num_tokens

    def keep(self, ticket_id: int, token_ids: Sequence[int], num_tokens: int, start: int = 0) -> None:
        """Let others share the full blocks of the first `num_tokens` of these tokens, prompt and answer: their KV is complete
        in an attached ticket's blocks. What lies before token `start` was shared before.
        """
        entry = self._attached(ticket_id)
        if entry.mixed:
            return
        if len(entry.keys) < num_tokens // self._block_size:
            entry.keys = more_keys(entry.keys, token_ids[:num_tokens], self._block_size, entry.cache_salt)
        self._tables.insert(entry.block_table, entry.keys, start // self._block_size, num_tokens // self._block_size)

    def preempt(self, ticket_id: int) -> None:
        """Take all blocks of an attached ticket, which stays attached.

        Called between two steps, so that nothing writes into them, and not while they are sent to another worker.
        """
        entry = self._attached(ticket_id)
        assert not entry.quarantined, "blocks are in use"
        self._blocks.release(entry.block_table, entry.keys, entry.cache_salt)
        entry.block_table.empty()
        entry.wanted_from = None

    def freeing(self, shared: Sequence[bytes]) -> Callable[[int], int]:
        """Return a function that takes one ticket after the other, and says how many blocks nobody would own any more if this
        one, too, were preempted. The cached blocks of `shared` do not count: another will own them.
        """
        freed = self._blocks.cache.freeing(shared)
        return lambda ticket_id: freed(self._ledger.entry(ticket_id).block_table.owned)

    def return_cost(self, ticket_id: int, num_tokens: int, at_most: int) -> Cost:
        """Return what `readmit` would take as things are."""
        first, cached = self._blocks.cached(self._attached(ticket_id).keys, at_most)
        return self._blocks.cost(first, self._blocks.holding(num_tokens), cached)

    def readmit(self, ticket_id: int, num_tokens: int, at_most: int, spare: int | None = None) -> int | None:
        """Give a preempted ticket blocks for its tokens, as many as it has at once, if `spare` blocks stay free as beside a new
        ticket.

        Returns how many leading tokens have their KV there, at most `at_most`. Returns None, and changes nothing, if there is
        no room.
        """
        entry = self._attached(ticket_id)
        assert entry.preempted, "only what was preempted comes back"
        first, cached = self._blocks.cached(entry.keys, at_most)
        spare = self._ledger.num_holders if spare is None else spare
        table = self._blocks.new(first, self._blocks.holding(num_tokens), cached, spare)
        if table is None:
            return None
        entry.block_table.take(table)
        return len(cached) * self._block_size

    def begin_step(self, ticket_ids: Iterable[int]) -> None:
        """Tell that the engine computes these attached tickets. Their blocks stay theirs until `end_step`."""
        for ticket_id in ticket_ids:
            entry = self._ledger.entry(ticket_id)
            assert entry.state is TicketState.ATTACHED, "only attached tickets are computed"
            assert not entry.preempted, "and only with blocks"
            entry.in_step = True

    def end_step(self, ticket_ids: Iterable[int]) -> None:
        """Tell that the engine no longer writes into the blocks of these tickets."""
        for ticket_id in ticket_ids:
            entry = self._ledger.entry(ticket_id)
            entry.in_step = False
            self._ledger.settle(entry)

    def want(self, ticket_id: int, start: int | None) -> None:
        """Tell from which token on another worker waits for an attached ticket's KV: that is kept though it is not seen any
        more, until nobody waits for it (None), or the ticket is preempted. No effect on one that is gone.
        """
        entry = self._ledger.find(ticket_id)
        if entry is not None:
            entry.wanted_from = start

    def begin_send(self, ticket_id: int) -> None:
        """Tell that an attached ticket's blocks are read for another worker. They stay the ticket's until `end_send`."""
        entry = self._attached(ticket_id)
        assert not entry.sending, "a stream migrates to one place at a time"
        entry.sending = True

    def end_send(self, ticket_id: int) -> None:
        """Tell that nothing reads the ticket's blocks for another worker any more."""
        entry = self._ledger.entry(ticket_id)
        entry.sending = False
        self._ledger.settle(entry)

    def _attach(self, entry: TicketEntry) -> TicketEntry:
        self._ledger.move(entry, TicketState.ATTACHED)
        self.cache_queries += len(entry.token_ids)
        self.cache_hits += entry.held_tokens
        return entry

    def _attached(self, ticket_id: int) -> TicketEntry:
        entry = self._ledger.entry(ticket_id)
        assert entry.state is TicketState.ATTACHED, "only attached tickets grow and shrink"
        return entry
