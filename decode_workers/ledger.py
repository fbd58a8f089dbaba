"""The ledger: who owns which KV blocks of this decode worker, and why. Pure Python; the states are `protocol.ticket`.

                   ┌─────────────────────attach_here───────────────────┐
    reserve ──► RESERVED ──begin_push──► RECEIVING ──commit──► COMMITTED ──attach──► ATTACHED ──release──► RELEASED
                          any of these ──abort / expire──► ABORTED / EXPIRED

Who moves a ticket: the router (reserve, attach, release), the prefill worker (begin_push, commit, abort), the worker itself
(end_push, expire, abort when an owner is gone). Every method is safe to call late, twice or for an unknown ticket.

A reservation covers the prompt and the beginning of the answer (`protocol.ticket.reserved_tokens`). An attached ticket grows
with its answer; the scheduler may preempt it, which takes all its blocks, and readmit it later. It stays ATTACHED throughout.
How many blocks have to stay free beside a new ticket is the scheduler's business.

Full blocks are kept when their ticket is gone (`engine.memory.prefix_cache`): those of a prompt that was committed or computed
here, and those of an answer that was preempted or came to its end. A new ticket shares what is there of its prompt's
beginning; it is `held`, never written again, and not sent.

Where all layers of the model have a sliding window, a ticket has no blocks for what is not seen any more (`engine.memory.
block_table`). What is sent begins behind that; a prompt that is computed here gets its blocks as it goes.

Who frees: `_settle`, when a ticket is final and neither a push nor an engine step writes into its blocks. Until then the
blocks are quarantined. A ticket leaves the books at that moment and not before.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from configs.model_files.kv_window import WHOLE, KvWindow
from decode_workers.ticket_blocks import Cost, TicketBlocks
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys, more_keys
from protocol.gang import STEP_LEASES
from protocol.share import NOBODYS, Share
from protocol.ticket import TicketState, check_transition


class Ledger:
    """All tickets of one decode worker.

    `clock` gives monotonic seconds. `on_committed` is called when a ticket may be attached, `on_failed` when one is aborted or
    expired, and `on_settled` when a ticket's blocks are free again. `on_released` gets the keys and the salt of blocks that a
    ticket no longer has. `ids` has the tickets' ids, where others take some of them, too. `window`, `step_tokens` and `beside`
    are those of `TicketBlocks`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        lease_s: float,
        clock: Callable[[], float],
        on_committed: Callable[[TicketEntry], None],
        on_failed: Callable[[TicketEntry], None],
        on_settled: Callable[[], None],
        on_released: Callable[[Sequence[bytes], str], None] | None = None,
        ids: Iterator[int] | None = None,
        *,
        window: KvWindow = WHOLE,
        step_tokens: int = 0,
        beside: Callable[[Sequence[bytes]], int] = lambda _: 0,
    ) -> None:
        self._cache = cache
        self.blocks = TicketBlocks(cache, block_size, window, step_tokens, beside)
        self._tables = self.blocks.tables
        self._window = window
        self._block_size = block_size
        self._lease_s = lease_s
        self._clock = clock
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._on_settled = on_settled
        self._on_released = on_released
        self._entries: dict[int, TicketEntry] = {}
        self._ids = itertools.count(1) if ids is None else ids
        self.cache_queries = 0
        """Prompt tokens of the tickets that were attached: others were copies, or came to nothing."""
        self.cache_hits = 0
        """Those of them that were held."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TicketEntry]:
        return iter(list(self._entries.values()))

    @property
    def num_holders(self) -> int:
        """Tickets that hold blocks, of which each may soon want another one."""
        return sum(bool(entry.block_table) for entry in self._entries.values() if not entry.state.final)

    @property
    def held_blocks(self) -> set[int]:
        """KV blocks that tickets hold."""
        return {block for entry in self._entries.values() for block in entry.block_table.owned}

    @property
    def growth(self) -> int:
        """Blocks that tickets will soon want: one for each that holds some, or all that it may once have at a time, where it
        gives others back.
        """
        if not self._tables.windowed:
            return self.num_holders
        growth, held = 0, set[int]()
        for entry in self._entries.values():
            if entry.block_table and not entry.state.final:
                # Of blocks that several share, all but one of them will want others.
                own = set(entry.block_table.owned) - held
                held |= own
                growth += max(0, self.blocks.at_once(len(entry.token_ids) + entry.max_tokens) - len(own))
        return growth

    def reserve(
        self,
        owner: bytes,
        token_ids: tuple[int, ...],
        max_tokens: int,
        cache_salt: str,
        trace_id: str = "",
        *,
        own_tokens: int = 0,
        share: Share = NOBODYS,
        spare: int | None = None,
    ) -> TicketEntry | None:
        """Make a ticket with blocks for the prompt and the beginning of the answer. Returns None when fewer than `spare` blocks
        would stay free: without it, one for each ticket that holds some.

        The blocks of the last `own_tokens` of the prompt are not taken from the cache. Without such tokens the prompt is not
        computed here.
        """
        blocks, num_tokens = self.blocks, len(token_ids)
        assert blocks.fits(num_tokens, max_tokens), "too long for this pool: refuse it on arrival"
        keys = self.keys(token_ids, cache_salt)
        first, cached = blocks.cached_for_new(keys, num_tokens, own_tokens)
        spare = self.num_holders if spare is None else spare
        block_table = blocks.new(first, blocks.reserved(num_tokens, max_tokens), cached, spare)
        if block_table is None:
            return None
        held, unseen = len(cached) * self._block_size, self._window.first_seen(num_tokens)
        # Whoever fills or aborts a transfer has been told its id: a number that comes from elsewhere meets no ticket.
        transfer_id = secrets.randbits(63)
        entry = TicketEntry(
            ticket_id=next(self._ids),
            transfer_id=transfer_id,
            owner=owner,
            token_ids=token_ids,
            max_tokens=max_tokens,
            cache_salt=cache_salt,
            share=share,
            keys=keys,
            held_tokens=held,
            unseen_tokens=unseen,
            block_table=block_table,
            deadline=self._deadline(),
            trace_id=trace_id,
        )
        self._entries[entry.ticket_id] = entry
        return entry

    def keys(self, token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
        """Return the keys of the full blocks of these tokens."""
        return block_keys(token_ids, self._block_size, cache_salt)

    def reserve_cost(self, keys: Sequence[bytes], num_tokens: int, max_tokens: int, own_tokens: int = 0) -> Cost:
        """Return what `reserve` would take as things are, for a prompt of `num_tokens` whose full blocks have these keys."""
        first, cached = self.blocks.cached_for_new(keys, num_tokens, own_tokens)
        return self.blocks.cost(first, self.blocks.reserved(num_tokens, max_tokens), cached)

    def find(self, ticket_id: int) -> TicketEntry | None:
        """The ticket's entry. None if it is unknown or in a final state."""
        entry = self._entries.get(ticket_id)
        return None if entry is None or entry.state.final else entry

    def begin_push(
        self, source: bytes, ticket_id: int, transfer_id: int, start: int, num_tokens: int, added: tuple[int, ...] = ()
    ) -> TicketEntry | None:
        """Open a push of tokens [start, start + num_tokens). Returns None to refuse it. Pushes of one transfer come in order.

        `added` are tokens that the ticket stands for from now on: those that a migrating stream has generated since the
        reservation.
        """
        entry = self._of_transfer(ticket_id, transfer_id)
        if entry is None or entry.filling or entry.state not in (TicketState.RESERVED, TicketState.RECEIVING):
            return None
        if entry.source not in (None, source) or start != entry.announced_tokens or num_tokens < 1:
            return None
        if start + num_tokens > len(entry.token_ids) + len(added) or not self._make_room(entry, added):
            return None
        if entry.state is TicketState.RESERVED:
            self._move(entry, TicketState.RECEIVING)
        entry.source = source
        entry.announced_tokens += num_tokens
        entry.pushes_in_flight += 1
        entry.deadline = self._deadline()
        return entry

    def end_push(self, ticket_id: int, num_tokens: int, ok: bool) -> None:
        """End a push, which then no longer holds the blocks. If it failed, its ticket is aborted."""
        entry = self._entries[ticket_id]
        assert entry.pushes_in_flight > 0, "more pushes ended than began"
        entry.pushes_in_flight -= 1
        if not entry.state.final:  # otherwise its blocks are quarantined for as long as the next push may take
            entry.deadline = self._deadline()
        if ok:
            entry.received_tokens += num_tokens
        elif not entry.state.final:
            self._fail(entry, TicketState.ABORTED)
        self._settle(entry)

    def fingerprints(self, ticket_id: int, transfer_id: int) -> Mapping[int, bytes] | None:
        """Fingerprints of what has arrived for this transfer, by lane. None if the ticket is gone."""
        entry = self._of_transfer(ticket_id, transfer_id)
        return None if entry is None else entry.digests

    def commit(self, ticket_id: int, transfer_id: int, num_tokens: int) -> bool:
        """Close a transfer whose fingerprints were checked. False if tokens are missing or the ticket is gone."""
        entry = self._of_transfer(ticket_id, transfer_id)
        if entry is None or entry.state not in (TicketState.RESERVED, TicketState.RECEIVING) or entry.pushes_in_flight:
            return False
        if not (num_tokens == entry.received_tokens == len(entry.token_ids)):
            return False
        self._move(entry, TicketState.COMMITTED)
        if len(entry.keys) < len(entry.token_ids) // self._block_size:  # of a stream that has migrated there are more by now
            entry.keys = more_keys(entry.keys, entry.token_ids, self._block_size, entry.cache_salt)
        self._tables.give_up(entry.block_table, entry.unseen_tokens // self._block_size, entry.keys)
        if not entry.mixed:
            self._tables.insert(entry.block_table, entry.keys)
        self._on_committed(entry)
        return True

    def want(self, ticket_id: int, start: int | None) -> None:
        """Tell from which token on another worker waits for an attached ticket's KV: that is kept though it is not seen any
        more, until nobody waits for it (None), or the ticket is preempted. No effect on one that is gone.
        """
        entry = self.find(ticket_id)
        if entry is not None:
            entry.wanted_from = start

    def begin_send(self, ticket_id: int) -> None:
        """Tell that an attached ticket's blocks are read for another worker. They stay the ticket's until `end_send`."""
        entry = self._attached(ticket_id)
        assert not entry.sending, "a stream migrates to one place at a time"
        entry.sending = True

    def end_send(self, ticket_id: int) -> None:
        """Tell that nothing reads the ticket's blocks for another worker any more."""
        entry = self._entries[ticket_id]
        entry.sending = False
        self._settle(entry)

    def begin_fill(self, ticket_id: int) -> bool:
        """Tell that a tier's blocks are read into those of a ticket whose prompt is computed here. They stay the ticket's until
        `end_fill`. False if it is gone or was attached.
        """
        entry = self.find(ticket_id)
        if entry is None or entry.state is not TicketState.RESERVED:
            return False
        entry.filling = True
        return True

    def end_fill(self, ticket_id: int, held_tokens: int) -> None:
        """Tell that nothing is read into them any more, and that so many leading tokens, in whole blocks, have their KV."""
        entry = self._entries[ticket_id]
        entry.filling = False
        if not entry.state.final:
            entry.held_tokens = entry.announced_tokens = entry.received_tokens = held_tokens
            self._tables.insert(entry.block_table, entry.keys[: held_tokens // self._block_size])
        self._settle(entry)

    def attach(self, ticket_id: int) -> TicketEntry | None:
        """Hand a committed ticket to the batch. None if it is not committed."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.state is not TicketState.COMMITTED:
            return None
        return self._attach(entry)

    def attach_here(self, ticket_id: int) -> TicketEntry | None:
        """Hand a ticket to the batch for which nothing was sent: what is not held of its prompt is computed here.

        Returns None if it is not reserved, or if it can't be computed here (`computable`).
        """
        entry = self._entries.get(ticket_id)
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
            kept_from = self._window.kept_from(computed)
            if entry.wanted_from is not None:
                kept_from = min(kept_from, entry.wanted_from)
            self._tables.give_up(entry.block_table, kept_from // self._block_size, entry.keys)
        length = self.blocks.holding(num_tokens)
        missing = length - len(entry.block_table)
        return missing <= 0 or (missing <= self.blocks.num_free and self._tables.lengthen(entry.block_table, length))

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
        self._release(entry)
        entry.block_table.empty()
        entry.wanted_from = None

    def freeing(self, shared: Sequence[bytes]) -> Callable[[int], int]:
        """Return a function that takes one ticket after the other, and says how many blocks nobody would own any more if this
        one, too, were preempted. The cached blocks of `shared` do not count: another will own them.
        """
        freed = self._cache.freeing(shared)
        return lambda ticket_id: freed(self._entries[ticket_id].block_table.owned)

    def return_cost(self, ticket_id: int, num_tokens: int, at_most: int) -> Cost:
        """Return what `readmit` would take as things are."""
        first, cached = self.blocks.cached(self._attached(ticket_id).keys, at_most)
        return self.blocks.cost(first, self.blocks.holding(num_tokens), cached)

    def readmit(self, ticket_id: int, num_tokens: int, at_most: int, spare: int | None = None) -> int | None:
        """Give a preempted ticket blocks for its tokens, as many as it has at once, if `spare` blocks stay free as beside a new
        ticket.

        Returns how many leading tokens have their KV there, at most `at_most`. Returns None, and changes nothing, if there is
        no room.
        """
        entry = self._attached(ticket_id)
        assert entry.preempted, "only what was preempted comes back"
        first, cached = self.blocks.cached(entry.keys, at_most)
        spare = self.num_holders if spare is None else spare
        table = self.blocks.new(first, self.blocks.holding(num_tokens), cached, spare)
        if table is None:
            return None
        entry.block_table.take(table)
        return len(cached) * self._block_size

    def begin_step(self, ticket_ids: Iterable[int]) -> None:
        """Tell that the engine computes these attached tickets. Their blocks stay theirs until `end_step`."""
        for ticket_id in ticket_ids:
            entry = self._entries[ticket_id]
            assert entry.state is TicketState.ATTACHED, "only attached tickets are computed"
            assert not entry.preempted, "and only with blocks"
            entry.in_step = True

    def end_step(self, ticket_ids: Iterable[int]) -> None:
        """Tell that the engine no longer writes into the blocks of these tickets."""
        for ticket_id in ticket_ids:
            entry = self._entries[ticket_id]
            entry.in_step = False
            self._settle(entry)

    def release(self, ticket_id: int) -> None:
        """End a ticket that its owner needs no longer. Before the commit this is a cancel."""
        entry = self.find(ticket_id)
        if entry is None:
            return
        receiving = entry.state is TicketState.RECEIVING
        self._move(entry, TicketState.ABORTED if receiving else TicketState.RELEASED)
        self._settle(entry)

    def abort(self, ticket_id: int) -> None:
        """End a ticket that can't be filled. Idempotent."""
        entry = self.find(ticket_id)
        if entry is not None:
            self._fail(entry, TicketState.ABORTED)
            self._settle(entry)

    def abort_transfer(self, ticket_id: int, transfer_id: int) -> None:
        """End the ticket of a transfer that its sender gives up. Without effect on a transfer that was committed."""
        entry = self._of_transfer(ticket_id, transfer_id)
        if entry is not None and entry.state in (TicketState.RESERVED, TicketState.RECEIVING):
            self.abort(ticket_id)

    def peer_lost(self, peer: bytes) -> None:
        """End all tickets that a lost peer owned, and those that it was still filling."""
        for entry in self:
            filling = entry.source == peer and entry.state is TicketState.RECEIVING
            if entry.owner == peer or filling:
                self.abort(entry.ticket_id)

    def renew(self, owner: bytes, attaching: Container[int] = ()) -> None:
        """Renew the leases of a living router's reservations. Committed KV has to be attached in time all the same.

        `attaching` are tickets that were attached in time, and whose streams wait for their grammar.
        """
        for entry in self._entries.values():
            waits = entry.state is TicketState.COMMITTED and entry.ticket_id in attaching
            if entry.owner == owner and (waits or entry.state in (TicketState.RESERVED, TicketState.RECEIVING)):
                entry.deadline = self._deadline()

    def expire(self) -> None:
        """End every ticket whose deadline has passed. An attached ticket has no deadline."""
        now = self._clock()
        for entry in self:
            if now >= entry.deadline and not entry.state.final and entry.state is not TicketState.ATTACHED:
                self._fail(entry, TicketState.EXPIRED)
                self._settle(entry)

    def check_integrity(self) -> None:
        """Assert that every block is free, kept, or owned by tickets, and what `check_tickets` does."""
        self._cache.check_integrity(entry.block_table.owned for entry in self._entries.values())
        self.check_tickets()

    def check_tickets(self) -> None:
        """Assert that no ticket is in the books for nothing, and that nobody writes into a block of two tickets."""
        written: list[int] = []
        for entry in self._entries.values():
            assert not entry.state.final or entry.quarantined, "a settled ticket is still in the books"
            written += entry.block_table[entry.sent_from // self._block_size :] if entry.pushes_in_flight else ()
        owners = Counter(block for entry in self._entries.values() for block in entry.block_table.owned)
        assert all(owners[block] == 1 for block in written), "a push writes into a shared block"

    def _make_room(self, entry: TicketEntry, added: tuple[int, ...]) -> bool:
        """Let a ticket that is filled stand for these as well, and have blocks for all that is seen. False, and nothing
        changes, if they are too many or need too many blocks.
        """
        max_tokens = entry.max_tokens - len(added)
        if max_tokens < 1:
            return False
        token_ids = entry.token_ids + added
        length = self.blocks.reserved(len(token_ids), max_tokens)
        first = entry.unseen_tokens // self._block_size
        if not self._tables.move(entry.block_table, first, length, entry.keys, self.blocks.kept()):
            return False
        entry.token_ids, entry.max_tokens = token_ids, max_tokens
        return True

    def _attach(self, entry: TicketEntry) -> TicketEntry:
        self._move(entry, TicketState.ATTACHED)
        self.cache_queries += len(entry.token_ids)
        self.cache_hits += entry.held_tokens
        return entry

    def _attached(self, ticket_id: int) -> TicketEntry:
        entry = self._entries[ticket_id]
        assert entry.state is TicketState.ATTACHED, "only attached tickets grow and shrink"
        return entry

    def _of_transfer(self, ticket_id: int, transfer_id: int) -> TicketEntry | None:
        entry = self.find(ticket_id)
        return entry if entry is not None and entry.transfer_id == transfer_id else None

    def _deadline(self, leases: int = 1) -> float:
        return self._clock() + leases * self._lease_s

    def _move(self, entry: TicketEntry, state: TicketState) -> None:
        check_transition(entry.state, state)
        entry.state = state
        # A push that waits for its step goes on into the quarantined blocks.
        entry.deadline = self._deadline(STEP_LEASES if state.final else 1)

    def _fail(self, entry: TicketEntry, state: TicketState) -> None:
        self._move(entry, state)
        self._on_failed(entry)

    def _settle(self, entry: TicketEntry) -> None:
        if entry.state.final and not entry.quarantined:
            del self._entries[entry.ticket_id]
            self._release(entry)
            self._on_settled()

    def _release(self, entry: TicketEntry) -> None:
        self._tables.release(entry.block_table, entry.keys)
        if self._on_released is not None and entry.block_table:
            self._on_released(entry.keys, entry.cache_salt)
