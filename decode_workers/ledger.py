"""The ledger: who owns which KV blocks of this decode worker, and why. Pure Python; the states are `protocol.ticket`.

                   ┌─────────────────────attach_here───────────────────┐
    reserve ──► RESERVED ──begin_push──► RECEIVING ──commit──► COMMITTED ──attach──► ATTACHED ──release──► RELEASED
                          any of these ──abort / expire──► ABORTED / EXPIRED

Who moves a ticket: the router (reserve, attach, release), the prefill worker (begin_push, commit, abort), the worker itself
(end_push, expire, abort when an owner is gone). Every method is safe to call late, twice or for an unknown ticket, but for
those that end what was begun.

A reservation covers the prompt and the beginning of the answer (`protocol.ticket.reserved_tokens`). How many blocks have to
stay free beside a new ticket is the scheduler's business. In `decode_workers.attached_tickets` is what becomes of an attached
ticket's blocks while it is in the batch.

Full blocks are kept when their ticket is gone (`engine.memory.prefix_cache`): those of a prompt that was committed or computed
here, and those of an answer that was preempted or came to its end. A new ticket shares what is there of its prompt's
beginning; it is `held`, never written again, and not sent.

Where all layers of the model have a sliding window, a ticket has no blocks for what is not seen any more (`engine.memory.
block_table`). What is sent begins behind that; a prompt that is computed here gets its blocks as it goes.

Who frees: `settle`, when a ticket is final and nothing reads or writes its blocks any more. Until then the blocks are
quarantined. A ticket leaves the books at that moment and not before. Only what a ticket no longer sees, and what a preempted
one had, comes free earlier.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from configs.model_files.kv_window import WHOLE, KvWindow
from decode_workers.ticket_blocks import TicketBlocks
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys, more_keys
from protocol.gang import STEP_LEASES
from protocol.share import NOBODYS, Share
from protocol.ticket import TicketState, check_transition


class Ledger:
    """All tickets of one decode worker.

    `clock` gives monotonic seconds. `on_committed` is called when a ticket may be attached, `on_failed` when one is aborted or
    expired, and `on_settled` when a ticket's blocks are free again. `ids` has the tickets' ids, where others take some of them,
    too. `on_released`, `window`, `step_tokens` and `beside` are those of `TicketBlocks`.
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
        self.blocks = TicketBlocks(cache, block_size, window, step_tokens, beside, on_released)
        self._tables = self.blocks.tables
        self._window = window
        self._block_size = block_size
        self._lease_s = lease_s
        self._clock = clock
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._on_settled = on_settled
        self._entries: dict[int, TicketEntry] = {}
        self._ids = itertools.count(1) if ids is None else ids

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
        keys = block_keys(token_ids, self._block_size, cache_salt)
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

    def find(self, ticket_id: int) -> TicketEntry | None:
        """The ticket's entry. None if it is unknown or in a final state."""
        entry = self._entries.get(ticket_id)
        return None if entry is None or entry.state.final else entry

    def entry(self, ticket_id: int) -> TicketEntry:
        """The entry of a ticket that is in the books, also if it is in a final state. Raises KeyError for any other."""
        return self._entries[ticket_id]

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
            self.move(entry, TicketState.RECEIVING)
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
        self.settle(entry)

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
        self.move(entry, TicketState.COMMITTED)
        if len(entry.keys) < len(entry.token_ids) // self._block_size:  # of a stream that has migrated there are more by now
            entry.keys = more_keys(entry.keys, entry.token_ids, self._block_size, entry.cache_salt)
        self._tables.give_up(entry.block_table, entry.unseen_tokens // self._block_size, entry.keys)
        if not entry.mixed:
            self._tables.insert(entry.block_table, entry.keys)
        self._on_committed(entry)
        return True

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
        self.settle(entry)

    def release(self, ticket_id: int) -> None:
        """End a ticket that its owner needs no longer. Before the commit this is a cancel."""
        entry = self.find(ticket_id)
        if entry is None:
            return
        receiving = entry.state is TicketState.RECEIVING
        self.move(entry, TicketState.ABORTED if receiving else TicketState.RELEASED)
        self.settle(entry)

    def abort(self, ticket_id: int) -> None:
        """End a ticket that can't be filled. Idempotent."""
        entry = self.find(ticket_id)
        if entry is not None:
            self._fail(entry, TicketState.ABORTED)
            self.settle(entry)

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
                self.settle(entry)

    def move(self, entry: TicketEntry, state: TicketState) -> None:
        """Bring a ticket to another state, and set its deadline. Raises AssertionError if it may not go there."""
        check_transition(entry.state, state)
        entry.state = state
        # A push that waits for its step goes on into the quarantined blocks.
        entry.deadline = self._deadline(STEP_LEASES if state.final else 1)

    def settle(self, entry: TicketEntry) -> None:
        """Free a ticket's blocks and strike it off the books, if it is final and nothing uses the blocks any more. Called when
        a ticket has ended, and when something has ended that used its blocks.
        """
        if entry.state.final and not entry.quarantined:
            del self._entries[entry.ticket_id]
            self.blocks.release(entry.block_table, entry.keys, entry.cache_salt)
            self._on_settled()

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

    def _of_transfer(self, ticket_id: int, transfer_id: int) -> TicketEntry | None:
        entry = self.find(ticket_id)
        return entry if entry is not None and entry.transfer_id == transfer_id else None

    def _deadline(self, leases: int = 1) -> float:
        return self._clock() + leases * self._lease_s

    def _fail(self, entry: TicketEntry, state: TicketState) -> None:
        self.move(entry, state)
        self._on_failed(entry)
