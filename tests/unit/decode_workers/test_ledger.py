"""Any interleaving of what routers, prefill workers, time and the engine can do leaves no block leaked or owned twice."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from configs.arithmetic import ceil_div
from configs.model_files.kv_window import WHOLE
from decode_workers.attached_tickets import AttachedTickets
from decode_workers.ledger import Ledger
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys
from protocol.ticket import TicketState, check_transition
from tests.unit.decode_workers.small_ledger import BLOCK_SIZE, LEASE_S, NUM_BLOCKS, WINDOW, book, receive

STEP_TOKENS = 5
ROUTERS = [b"router-1", b"router-2"]
PREFILLS = [b"prefill-1", b"prefill-2"]


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a world that sends everything late, twice, out of order and to the wrong ticket."""

    window = WHOLE

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache = PrefixCache(NUM_BLOCKS)
        self.committed: list[int] = []
        self.failed: list[int] = []
        self.settled = 0
        self.ledger = Ledger(
            self.cache,
            BLOCK_SIZE,
            LEASE_S,
            lambda: self.now,
            on_committed=lambda entry: self.committed.append(entry.ticket_id),
            on_failed=lambda entry: self.failed.append(entry.ticket_id),
            on_settled=self._settled,
            window=self.window,
            step_tokens=STEP_TOKENS,
        )
        self.attached = AttachedTickets(self.ledger)
        self.entries: dict[int, TicketEntry] = {}
        self.pushes: list[tuple[TicketEntry, int]] = []
        self.stepping: list[int] = []
        self.sending: list[TicketEntry] = []
        """Those that migrate to another worker."""
        self.wanted: dict[int, int] = {}
        """From which token on others wait for a ticket's KV."""
        self.contents: dict[int, tuple[str, tuple[int, ...]] | None] = {}
        """Of each block: salt and tokens up to its end if it is full, None if it is being filled."""

    def _settled(self) -> None:
        self.settled += 1

    def _id(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.entries) + 1))

    def _fill(self, entry: TicketEntry, token_ids: tuple[int, ...], start: int = 0) -> None:
        """The KV of these tokens from `start` on has been written, or was there."""
        for number in range(max(entry.block_table.first, start // BLOCK_SIZE), len(token_ids) // BLOCK_SIZE):
            self.contents[entry.block_table[number]] = (entry.cache_salt, token_ids[: (number + 1) * BLOCK_SIZE])

    def _compute(self, entry: TicketEntry, token_ids: tuple[int, ...], start: int) -> None:
        """By the engine, a step after the other, as far as there are blocks for it."""
        while start < len(token_ids):
            end = min(start + STEP_TOKENS, len(token_ids))
            before = entry.block_table[entry.block_table.first :]
            if not self.attached.grow(entry.ticket_id, end, start):
                self.ledger.release(entry.ticket_id)
                return
            self.contents |= dict.fromkeys(set(entry.block_table.owned) - set(before))
            assert entry.block_table.first * BLOCK_SIZE <= self.window.first_seen(start), "what is read is there"
            self._fill(entry, token_ids[:end], start)
            self.attached.keep(entry.ticket_id, token_ids, end, start)
            start = end

    def _table(self, keys: list[bytes], num_tokens: int, sent_from: int | None) -> tuple[int, int, int]:
        """How many leading blocks are held, and where a new table for this many tokens begins and ends."""
        window = self.window
        first_of = [window.first_seen(count * BLOCK_SIZE) // BLOCK_SIZE for count in range(len(keys) + 1)]
        held = max(n for n, first in enumerate(first_of) if all(map(self.cache.has, keys[first:n])))
        first, whole = first_of[held] if sent_from is None else sent_from // BLOCK_SIZE, ceil_div(num_tokens, BLOCK_SIZE)
        return held, first, min(whole, first + ceil_div(window.at_once(whole * BLOCK_SIZE, STEP_TOKENS), BLOCK_SIZE))

    @rule(
        owner=st.sampled_from(ROUTERS),
        prompt=st.integers(1, 20),
        answer=st.integers(1, 20),
        salt=st.sampled_from(["", "a"]),
        own=st.sampled_from([0, 0, 1, 20]),
        spare=st.sampled_from([None, None, 0, 3]),
    )
    def reserve(self, owner: bytes, prompt: int, answer: int, salt: str, own: int, spare: int | None) -> None:
        live = [entry for entry in self.ledger if not entry.state.final]
        room = self.cache.num_free - (sum(bool(entry.block_table) for entry in live) if spare is None else spare)
        own = min(own, prompt)
        keys = block_keys(range(prompt - own), BLOCK_SIZE, salt)
        unseen = self.window.first_seen(prompt)
        cached, first, length = self._table(keys, prompt + min(answer, BLOCK_SIZE) - 1, None if own else unseen)
        needed = self.cache.cost(length - first, keys[first:cached])
        entry = self.ledger.reserve(owner, tuple(range(prompt)), answer, salt, own_tokens=own, spare=spare)
        assert (entry is None) == (needed > room), "full means full, and only then"
        if entry is not None:
            assert (entry.block_table.first, len(entry.block_table)) == (first, length)
            assert entry.sent_from == max(unseen, entry.held_tokens)
            assert entry.transfer_id != entry.ticket_id
            assert entry.held_tokens == cached * BLOCK_SIZE
            for number, block in enumerate(entry.block_table[first:cached], first):
                assert self.contents[block] == (salt, tuple(range((number + 1) * BLOCK_SIZE))), "held KV is what it should be"
            self.entries[entry.ticket_id] = entry

    @rule(
        data=st.data(),
        source=st.sampled_from(PREFILLS),
        start=st.integers(0, 20),
        count=st.integers(0, 20),
        right=st.booleans(),
        more=st.sampled_from([0, 0, 1, 5]),
    )
    def begin_push(self, data: st.DataObject, source: bytes, start: int, count: int, right: bool, more: int) -> None:
        """With `more`, by a stream that migrates here and goes on meanwhile."""
        known = self.entries.get(self._id(data))
        ticket_id = known.ticket_id if known else 99
        transfer_id = known.transfer_id if known and right else ticket_id
        if known is not None and right:
            start = known.announced_tokens
        length, longest = (len(known.token_ids), known.max_tokens) if known else (0, 0)
        blocks = len(known.block_table) if known else 0
        entry = self.ledger.begin_push(source, ticket_id, transfer_id, start, count, tuple(range(length, length + more)))
        if entry is None:
            assert known is None or (len(known.token_ids), len(known.block_table)) == (length, blocks), (
                "a refusal changes nothing"
            )
        else:
            assert (len(entry.token_ids), entry.max_tokens) == (length + more, longest - more)
            assert entry.max_tokens >= 1
            assert len(entry.token_ids) <= len(entry.block_table) * BLOCK_SIZE
            assert transfer_id == entry.transfer_id
            assert entry.announced_tokens <= len(entry.token_ids)
            assert start >= entry.held_tokens, "what is held is not written"
            assert start >= entry.block_table.first * BLOCK_SIZE, "nor what is not there"
            self.pushes.append((entry, count))
            for block in entry.block_table[start // BLOCK_SIZE : ceil_div(start + count, BLOCK_SIZE)]:
                self.contents[block] = None

    @rule(data=st.data(), ok=st.booleans())
    def end_push(self, data: st.DataObject, ok: bool) -> None:
        if self.pushes:
            entry, count = self.pushes.pop(data.draw(st.integers(0, len(self.pushes) - 1)))
            self.ledger.end_push(entry.ticket_id, count, ok)

    @rule(data=st.data(), off=st.integers(-1, 1))
    def commit(self, data: st.DataObject, off: int) -> None:
        entry = self.entries.get(self._id(data))
        if entry is not None:
            if entry.state in (TicketState.RESERVED, TicketState.RECEIVING):
                self._fill(entry, entry.token_ids[: entry.received_tokens], entry.sent_from)
            done = self.ledger.commit(entry.ticket_id, entry.transfer_id, len(entry.token_ids) + off)
            whole = entry.received_tokens == len(entry.token_ids)
            assert not done or (off == 0 and whole and not entry.pushes_in_flight)
            assert not done or self.committed[-1] == entry.ticket_id

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        ticket_id = self._id(data)
        before = self.entries[ticket_id].state if ticket_id in self.entries else None
        entry = self.attached.attach(ticket_id)
        assert (entry is not None) == (before is TicketState.COMMITTED), "only committed KV is attached to"

    @rule(data=st.data())
    def attach_here(self, data: st.DataObject) -> None:
        """Its prompt is computed here; what is held of it stays as it is."""
        known = self.entries.get(self._id(data))
        before = known.state if known else None
        entry = self.attached.attach_here(known.ticket_id if known else 99)
        missing = known is not None and known.held_tokens < len(known.token_ids)
        if known is not None and known.block_table.first * BLOCK_SIZE > self.window.first_seen(known.held_tokens):
            missing = False  # it was reserved for KV that is sent
        assert (entry is not None) == (before is TicketState.RESERVED and missing)
        if entry is not None:
            self._compute(entry, entry.token_ids, entry.held_tokens)

    @rule(data=st.data())
    def run_smoothly(self, data: st.DataObject) -> None:
        """From a reservation to the batch in one go, so that what comes after is reached often."""
        entry = self.entries.get(self._id(data))
        if entry is not None and entry.state is TicketState.RESERVED:
            num_tokens = len(entry.token_ids)
            start = entry.sent_from
            if missing := num_tokens - start:
                if self.ledger.begin_push(PREFILLS[0], entry.ticket_id, entry.transfer_id, start, missing) is None:
                    assert self.window is not WHOLE, "its blocks are reserved, but for those that it has in place of others"
                    return
                self.ledger.end_push(entry.ticket_id, missing, ok=True)
            self._fill(entry, entry.token_ids, start)
            assert self.ledger.commit(entry.ticket_id, entry.transfer_id, num_tokens)
            assert self.attached.attach(entry.ticket_id) is entry

    @rule(data=st.data(), more=st.integers(0, 20))
    def grow(self, data: st.DataObject, more: int) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry.block_table:
            before, first = len(entry.block_table), entry.block_table.first
            computed, num_tokens = len(entry.token_ids), len(entry.token_ids) + more
            seen = min(self.window.kept_from(computed), self.wanted.get(entry.ticket_id, computed))
            kept = max(first, 0 if entry in self.sending else seen // BLOCK_SIZE)
            given = self.cache.num_sole(entry.block_table[first:kept])
            missing = max(0, ceil_div(num_tokens, BLOCK_SIZE) - before)
            fits = missing <= self.cache.num_free + given
            assert self.attached.grow(entry.ticket_id, num_tokens, computed) == fits
            assert entry.block_table.first == kept
            assert len(entry.block_table) == before + (missing if fits else 0), "wholly or not at all"
            self.contents |= dict.fromkeys(entry.block_table[before:])

    @rule(data=st.data(), answer=st.integers(0, 20))
    def keep(self, data: st.DataObject, answer: int) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry.block_table:
            room = len(entry.block_table) * BLOCK_SIZE - len(entry.token_ids)
            token_ids = (*entry.token_ids, *(range(100, 100 + min(answer, room))))
            self._fill(entry, token_ids)
            self.attached.keep(entry.ticket_id, token_ids, len(token_ids))

    @rule(data=st.data(), start=st.none() | st.integers(0, 20))
    def want(self, data: st.DataObject, start: int | None) -> None:
        ticket_id = self._id(data)
        self.attached.want(ticket_id, start)
        self.wanted.pop(ticket_id, None)
        if start is not None and self.ledger.find(ticket_id) is not None:
            self.wanted[ticket_id] = start

    @rule(data=st.data())
    def begin_send(self, data: st.DataObject) -> None:
        entry = self.entries.get(self._id(data))
        if entry is not None and entry.state is TicketState.ATTACHED and not entry.preempted and entry not in self.sending:
            self.attached.begin_send(entry.ticket_id)
            self.sending.append(entry)

    @rule(data=st.data())
    def end_send(self, data: st.DataObject) -> None:
        if self.sending:
            entry = self.sending.pop(data.draw(st.integers(0, len(self.sending) - 1)))
            self.attached.end_send(entry.ticket_id)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry not in self.sending:
            table = list(entry.block_table.owned)
            others = {block for other in self.ledger if other is not entry for block in other.block_table.owned}
            free = self.cache.num_free + sum(block not in others for block in table)
            self.attached.preempt(entry.ticket_id)
            self.wanted.pop(entry.ticket_id, None)
            assert self.cache.num_free == free
            assert entry.preempted

    @rule(data=st.data(), more=st.integers(0, 20), at_most=st.sampled_from([0, 5, 40, 40]))
    def readmit(self, data: st.DataObject, more: int, at_most: int) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry.preempted:
            others = sum(bool(other.block_table) for other in self.ledger if not other.state.final)
            more = max(more, len(entry.keys) * BLOCK_SIZE - len(entry.token_ids))
            num_tokens, keys = len(entry.token_ids) + more, entry.keys[: at_most // BLOCK_SIZE]
            cached, first, length = self._table(keys, num_tokens, None)
            fits = self.cache.cost(length - first, keys[first:cached]) <= self.cache.num_free - others
            there = self.attached.readmit(entry.ticket_id, num_tokens, at_most)
            assert there == (cached * BLOCK_SIZE if fits else None)
            assert len(entry.block_table) == (length if fits else 0)
            for block in entry.block_table[entry.block_table.first : cached]:
                assert self.contents[block] is not None, "what is still there is whole"
            self.contents |= dict.fromkeys(entry.block_table[cached:])
            if fits and entry not in self.sending:
                self._compute(entry, entry.token_ids, cached * BLOCK_SIZE)

    def _between_steps(self, data: st.DataObject) -> TicketEntry | None:
        entry = self.entries.get(self._id(data))
        return entry if entry and entry.state is TicketState.ATTACHED and not self.stepping else None

    @rule()
    def begin_step(self) -> None:
        if not self.stepping:
            self.stepping = [e.ticket_id for e in self.ledger if e.state is TicketState.ATTACHED and not e.preempted]
            self.attached.begin_step(self.stepping)

    @rule()
    def end_step(self) -> None:
        self.attached.end_step(self.stepping)
        self.stepping = []

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.ledger.release(self._id(data))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.ledger.abort(self._id(data))

    @rule(data=st.data(), right=st.booleans())
    def abort_transfer(self, data: st.DataObject, right: bool) -> None:
        entry = self.entries.get(self._id(data))
        if entry is not None:
            before = entry.state
            self.ledger.abort_transfer(entry.ticket_id, entry.transfer_id if right else 0)
            past = before in (TicketState.COMMITTED, TicketState.ATTACHED) or before.final
            assert entry.state is before if past or not right else entry.state is TicketState.ABORTED

    @rule(peer=st.sampled_from(ROUTERS + PREFILLS))
    def peer_lost(self, peer: bytes) -> None:
        self.ledger.peer_lost(peer)
        for entry in self.entries.values():
            assert entry.owner != peer or entry.state.final

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire()

    @rule(owner=st.sampled_from(ROUTERS), attaching=st.booleans())
    def ping(self, owner: bytes, attaching: bool) -> None:
        self.ledger.renew(owner, self.entries if attaching else ())

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity()
        for entry, _ in self.pushes:
            assert entry in list(self.ledger), "blocks are freed while a push writes into them"
        for entry in self.sending:
            assert entry in list(self.ledger), "blocks are freed while they are sent"
            assert entry.block_table
        for ticket_id in self.stepping:
            assert self.entries[ticket_id] in list(self.ledger), "blocks are freed while a step writes into them"

    def teardown(self) -> None:
        """Everybody goes away; whatever was going on, every block comes back by itself."""
        self.now += LEASE_S
        self.ledger.expire()
        for router in ROUTERS:
            self.ledger.peer_lost(router)
        while self.pushes:
            entry, count = self.pushes.pop()
            self.ledger.end_push(entry.ticket_id, count, ok=False)
        for entry in self.sending:
            self.attached.end_send(entry.ticket_id)
        self.end_step()
        assert len(self.ledger) == 0
        assert self.cache.num_free == NUM_BLOCKS
        assert self.settled == len(self.entries)
        assert len(self.failed) == len(set(self.failed)), "a failure is told once"


_NUM_SCHEDULES = 10_000 if os.environ.get("TANDEM_THOROUGH") else 300
_SETTINGS = settings(max_examples=_NUM_SCHEDULES, stateful_step_count=40)
LedgerMachine.TestCase.settings = _SETTINGS
TestLedger = LedgerMachine.TestCase


class WindowedLedgerMachine(LedgerMachine):
    """The same where a token sees four to seven tokens before it, and streams keep two more."""

    window = WINDOW


WindowedLedgerMachine.TestCase.settings = _SETTINGS
TestWindowedLedger = WindowedLedgerMachine.TestCase


def test_a_whole_life() -> None:
    ledger, blocks = book()
    attached = AttachedTickets(ledger)
    entry = ledger.reserve(b"r", tuple(range(10)), 38, "")
    assert entry is not None
    assert len(entry.block_table) == 4, "10 tokens and a block's worth of the answer, whose last token needs no slot"
    for start, count in ((0, 8), (8, 2)):
        assert ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, start, count) is entry
        ledger.end_push(entry.ticket_id, count, ok=True)
    assert ledger.commit(entry.ticket_id, entry.transfer_id, 10)
    assert attached.attach(entry.ticket_id) is entry
    assert attached.grow(entry.ticket_id, 17)
    assert len(entry.block_table) == 5
    attached.preempt(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS
    assert attached.readmit(entry.ticket_id, 17, 16) == 8, "of 10 tokens, the full blocks"
    attached.begin_step([entry.ticket_id])
    ledger.release(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS - 5, "quarantined while the engine writes"
    attached.end_step([entry.ticket_id])
    assert blocks.num_free == NUM_BLOCKS
    ledger.release(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS


def test_pings_keep_a_waiting_ticket_but_not_a_forgotten_one() -> None:
    now = [0.0]
    ledger, _ = book(clock=lambda: now[0])
    waiting = ledger.reserve(b"r", (1,), 1, "")
    forgotten = ledger.reserve(b"r", (1,), 1, "")
    assert waiting is not None
    assert forgotten is not None
    ledger.begin_push(b"p", forgotten.ticket_id, forgotten.transfer_id, 0, 1)
    ledger.end_push(forgotten.ticket_id, 1, ok=True)
    assert ledger.commit(forgotten.ticket_id, forgotten.transfer_id, 1)
    for _ in range(10):
        now[0] += LEASE_S / 2
        ledger.renew(b"r")
        ledger.expire()
    assert waiting.state is TicketState.RESERVED
    assert forgotten.state is TicketState.EXPIRED, "committed KV that nobody attaches to is given up"


def test_a_quarantined_ticket_keeps_its_deadline_when_one_of_two_pushes_ends() -> None:
    """The other may wait for its step. An audit finds what is held beyond its deadline."""
    ledger, _ = book()
    entry = ledger.reserve(b"r", tuple(range(12)), 2, "")
    assert entry is not None
    for start in (0, 6):
        assert ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, start, 6)
    ledger.abort(entry.ticket_id)
    deadline = entry.deadline
    ledger.end_push(entry.ticket_id, 6, ok=True)
    assert entry.quarantined
    assert entry.deadline == deadline
    ledger.end_push(entry.ticket_id, 6, ok=True)
    assert len(ledger) == 0


def test_one_block_for_each_ticket_stays_free_beside_a_new_one() -> None:
    ledger, blocks = book()
    prompt = tuple(range(2 * BLOCK_SIZE + 1))
    assert ledger.blocks.fits(len(prompt), 40)
    assert not ledger.blocks.fits(len(prompt), 41)
    granted = 0
    while ledger.reserve(b"r", prompt, 40, "") is not None:
        granted += 1
    assert (granted, blocks.num_free, ledger.num_holders) == (3, 3, 3)


@pytest.mark.parametrize("final", [TicketState.RELEASED, TicketState.ABORTED, TicketState.EXPIRED])
def test_nothing_leads_out_of_a_final_state(final: TicketState) -> None:
    for state in TicketState:
        with pytest.raises(AssertionError, match="can't go"):
            check_transition(final, state)


def test_what_is_held_is_shared_and_not_sent() -> None:
    ledger, cache = book()
    prompt = tuple(range(2 * BLOCK_SIZE + 1))
    first = ledger.reserve(b"r", prompt, 1, "")
    assert first is not None
    assert first.held_tokens == 0
    assert receive(ledger, first)
    second = ledger.reserve(b"r", (*prompt, 99), 1, "")
    other = ledger.reserve(b"r", prompt, 1, "somebody else's")
    assert second is not None
    assert other is not None
    assert (second.held_tokens, other.held_tokens) == (2 * BLOCK_SIZE, 0)
    assert second.block_table[:2] == first.block_table[:2]
    assert cache.num_references - cache.num_owned == 2
    overwriting = ledger.begin_push(b"p", second.ticket_id, second.transfer_id, 0, len(prompt) + 1)
    assert overwriting is None
    assert receive(ledger, second)


def test_a_prompt_that_is_held_as_a_whole_is_committed_without_a_push() -> None:
    ledger, _ = book()
    attached = AttachedTickets(ledger)
    prompt = tuple(range(2 * BLOCK_SIZE))
    first = ledger.reserve(b"r", prompt, 1, "")
    assert first is not None
    assert receive(ledger, first)
    ledger.release(first.ticket_id)
    second = ledger.reserve(b"r", prompt, 1, "")
    assert second is not None
    assert second.held_tokens == len(prompt)
    assert not ledger.commit(second.ticket_id, second.transfer_id, len(prompt) - 1)
    assert ledger.commit(second.ticket_id, second.transfer_id, len(prompt))
    assert attached.attach(second.ticket_id) is second


def test_nothing_of_an_uncommitted_transfer_is_kept() -> None:
    ledger, cache = book()
    prompt = tuple(range(2 * BLOCK_SIZE))
    first = ledger.reserve(b"r", prompt, 1, "")
    assert first is not None
    ledger.begin_push(b"p", first.ticket_id, first.transfer_id, 0, len(prompt))
    ledger.end_push(first.ticket_id, len(prompt), ok=True)
    second = ledger.reserve(b"r", prompt, 1, "")
    assert second is not None
    assert second.held_tokens == 0
    ledger.abort(first.ticket_id)
    ledger.release(second.ticket_id)
    assert cache.match(block_keys(prompt, BLOCK_SIZE, "")) == 0
