"""Any interleaving of what routers, prefill workers, time and the engine can do leaves no block leaked or owned twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from decode_workers.ledger import Ledger, TicketEntry
from engine.block_manager import BlockManager
from protocol.ticket import TicketState, check_transition

BLOCK_SIZE = 4
NUM_BLOCKS = 12
LEASE_S = 10.0
ROUTERS = [b"router-1", b"router-2"]
PREFILLS = [b"prefill-1", b"prefill-2"]


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a world that sends everything late, twice, out of order and to the wrong ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks = BlockManager(NUM_BLOCKS)
        self.committed: list[int] = []
        self.failed: list[int] = []
        self.settled = 0
        self.ledger = Ledger(
            self.blocks,
            BLOCK_SIZE,
            BLOCK_SIZE,
            LEASE_S,
            lambda: self.now,
            on_committed=lambda entry: self.committed.append(entry.ticket_id),
            on_failed=lambda entry: self.failed.append(entry.ticket_id),
            on_settled=self._settled,
        )
        self.entries: dict[int, TicketEntry] = {}
        self.pushes: list[tuple[TicketEntry, int]] = []
        self.stepping: list[int] = []

    def _settled(self) -> None:
        self.settled += 1

    def _id(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.entries) + 1))

    @rule(owner=st.sampled_from(ROUTERS), prompt=st.integers(1, 20), answer=st.integers(1, 20))
    def reserve(self, owner: bytes, prompt: int, answer: int) -> None:
        live = [entry for entry in self.ledger if not entry.state.final]
        room = self.blocks.num_free - sum(bool(entry.block_table) for entry in live)
        needed = -(-(prompt + min(answer, BLOCK_SIZE) - 1) // BLOCK_SIZE)
        entry = self.ledger.reserve(owner, tuple(range(prompt)), answer)
        waiting = any(entry.preempted for entry in live)
        assert (entry is None) == (needed > room or waiting), "full means full, and only then"
        if entry is not None:
            assert len(entry.block_table) == needed
            assert entry.transfer_id != entry.ticket_id
            self.entries[entry.ticket_id] = entry

    @rule(
        data=st.data(),
        source=st.sampled_from(PREFILLS),
        start=st.integers(0, 20),
        count=st.integers(0, 20),
        right=st.booleans(),
    )
    def begin_push(self, data: st.DataObject, source: bytes, start: int, count: int, right: bool) -> None:
        known = self.entries.get(self._id(data))
        ticket_id = known.ticket_id if known else 99
        transfer_id = known.transfer_id if known and right else ticket_id
        if known is not None and right:
            start = known.announced_tokens
        entry = self.ledger.begin_push(source, ticket_id, transfer_id, start, count)
        if entry is not None:
            assert transfer_id == entry.transfer_id
            assert entry.announced_tokens <= len(entry.token_ids)
            self.pushes.append((entry, count))

    @rule(data=st.data(), ok=st.booleans())
    def end_push(self, data: st.DataObject, ok: bool) -> None:
        if self.pushes:
            entry, count = self.pushes.pop(data.draw(st.integers(0, len(self.pushes) - 1)))
            self.ledger.end_push(entry.ticket_id, count, ok)

    @rule(data=st.data(), off=st.integers(-1, 1))
    def commit(self, data: st.DataObject, off: int) -> None:
        entry = self.entries.get(self._id(data))
        if entry is not None:
            done = self.ledger.commit(entry.ticket_id, entry.transfer_id, len(entry.token_ids) + off)
            whole = entry.received_tokens == len(entry.token_ids)
            assert not done or (off == 0 and whole and not entry.pushes_in_flight)
            assert not done or self.committed[-1] == entry.ticket_id

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        ticket_id = self._id(data)
        before = self.entries[ticket_id].state if ticket_id in self.entries else None
        entry = self.ledger.attach(ticket_id)
        assert (entry is not None) == (before is TicketState.COMMITTED), "only committed KV is attached to"

    @rule(data=st.data())
    def run_smoothly(self, data: st.DataObject) -> None:
        """From a reservation to the batch in one go, so that what comes after is reached often."""
        entry = self.entries.get(self._id(data))
        if entry is not None and entry.state is TicketState.RESERVED:
            num_tokens = len(entry.token_ids)
            assert self.ledger.begin_push(PREFILLS[0], entry.ticket_id, entry.transfer_id, 0, num_tokens) is entry
            self.ledger.end_push(entry.ticket_id, num_tokens, ok=True)
            assert self.ledger.commit(entry.ticket_id, entry.transfer_id, num_tokens)
            assert self.ledger.attach(entry.ticket_id) is entry

    @rule(data=st.data(), more=st.integers(0, 20))
    def grow(self, data: st.DataObject, more: int) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry.block_table:
            before = len(entry.block_table)
            num_tokens = len(entry.token_ids) + more
            missing = max(0, -(-num_tokens // BLOCK_SIZE) - before)
            fits = missing <= self.blocks.num_free
            assert self.ledger.grow(entry.ticket_id, num_tokens) == fits
            assert len(entry.block_table) == before + (missing if fits else 0), "wholly or not at all"

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        entry = self._between_steps(data)
        if entry is not None:
            free = self.blocks.num_free + len(entry.block_table)
            self.ledger.preempt(entry.ticket_id)
            assert self.blocks.num_free == free
            assert entry.preempted
            assert self.ledger.reservable_blocks == 0, "nobody overtakes it"

    @rule(data=st.data(), more=st.integers(0, 20))
    def readmit(self, data: st.DataObject, more: int) -> None:
        entry = self._between_steps(data)
        if entry is not None and entry.preempted:
            others = sum(bool(other.block_table) for other in self.ledger if not other.state.final)
            needed = -(-(len(entry.token_ids) + more) // BLOCK_SIZE)
            fits = needed <= self.blocks.num_free - others
            assert self.ledger.readmit(entry.ticket_id, len(entry.token_ids) + more) == fits
            assert len(entry.block_table) == (needed if fits else 0)

    def _between_steps(self, data: st.DataObject) -> TicketEntry | None:
        entry = self.entries.get(self._id(data))
        return entry if entry and entry.state is TicketState.ATTACHED and not self.stepping else None

    @rule()
    def begin_step(self) -> None:
        if not self.stepping:
            self.stepping = [e.ticket_id for e in self.ledger if e.state is TicketState.ATTACHED and not e.preempted]
            self.ledger.begin_step(self.stepping)

    @rule()
    def end_step(self) -> None:
        self.ledger.end_step(self.stepping)
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

    @rule(owner=st.sampled_from(ROUTERS))
    def ping(self, owner: bytes) -> None:
        self.ledger.renew(owner)

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check_integrity()
        for entry, _ in self.pushes:
            assert entry in list(self.ledger), "blocks are freed while a push writes into them"
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
        self.end_step()
        assert len(self.ledger) == 0
        assert self.blocks.num_free == NUM_BLOCKS
        assert self.settled == len(self.entries)
        assert len(self.failed) == len(set(self.failed)), "a failure is told once"


_NUM_SCHEDULES = 10_000 if os.environ.get("TANDEM_THOROUGH") else 300
LedgerMachine.TestCase.settings = settings(max_examples=_NUM_SCHEDULES, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase


def book(lease_s: float = LEASE_S, clock: Callable[[], float] = lambda: 0.0) -> tuple[Ledger, BlockManager]:
    blocks = BlockManager(NUM_BLOCKS)
    quiet: Callable[[TicketEntry], None] = lambda entry: None  # noqa: E731
    ledger = Ledger(
        blocks, BLOCK_SIZE, BLOCK_SIZE, lease_s, clock, on_committed=quiet, on_failed=quiet, on_settled=lambda: None
    )
    return ledger, blocks


def test_a_whole_life() -> None:
    ledger, blocks = book()
    entry = ledger.reserve(b"r", tuple(range(10)), 38)
    assert entry is not None
    assert len(entry.block_table) == 4, "10 tokens and a block's worth of the answer, whose last token needs no slot"
    for start, count in ((0, 8), (8, 2)):
        assert ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, start, count) is entry
        ledger.end_push(entry.ticket_id, count, ok=True)
    assert ledger.commit(entry.ticket_id, entry.transfer_id, 10)
    assert ledger.attach(entry.ticket_id) is entry
    assert ledger.grow(entry.ticket_id, 17)
    assert len(entry.block_table) == 5
    ledger.preempt(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS
    assert ledger.readmit(entry.ticket_id, 17)
    ledger.begin_step([entry.ticket_id])
    ledger.release(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS - 5, "quarantined while the engine writes"
    ledger.end_step([entry.ticket_id])
    assert blocks.num_free == NUM_BLOCKS
    ledger.release(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS


def test_pings_keep_a_waiting_ticket_but_not_a_forgotten_one() -> None:
    now = [0.0]
    ledger, _ = book(clock=lambda: now[0])
    waiting = ledger.reserve(b"r", (1,), 1)
    forgotten = ledger.reserve(b"r", (1,), 1)
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


def test_one_block_for_each_ticket_stays_free_beside_a_new_one() -> None:
    ledger, blocks = book()
    prompt = tuple(range(2 * BLOCK_SIZE + 1))
    assert ledger.fits(len(prompt), 40)
    assert not ledger.fits(len(prompt), 41)
    granted = 0
    while ledger.reserve(b"r", prompt, 40) is not None:
        granted += 1
    assert (granted, blocks.num_free, ledger.reservable_blocks) == (3, 3, 0)


def test_no_new_ticket_overtakes_a_preempted_one() -> None:
    ledger, blocks = book()
    entry = ledger.reserve(b"r", (1,), 40)
    assert entry is not None
    ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, 0, 1)
    ledger.end_push(entry.ticket_id, 1, ok=True)
    ledger.commit(entry.ticket_id, entry.transfer_id, 1)
    ledger.attach(entry.ticket_id)
    assert ledger.reservable_blocks == NUM_BLOCKS - 2
    ledger.preempt(entry.ticket_id)
    assert blocks.num_free == NUM_BLOCKS
    assert ledger.reserve(b"r", (1,), 1) is None
    assert ledger.readmit(entry.ticket_id, 9)
    assert ledger.reserve(b"r", (1,), 1) is not None
    ledger.preempt(entry.ticket_id)
    ledger.release(entry.ticket_id)
    assert ledger.reservable_blocks == NUM_BLOCKS - 2, "it left while it waited, and holds up nobody"


@pytest.mark.parametrize("final", [TicketState.RELEASED, TicketState.ABORTED, TicketState.EXPIRED])
def test_nothing_leads_out_of_a_final_state(final: TicketState) -> None:
    for state in TicketState:
        with pytest.raises(AssertionError, match="can't go"):
            check_transition(final, state)


def test_a_ticket_that_reserves_its_whole_answer_never_grows() -> None:
    blocks = BlockManager(NUM_BLOCKS)
    quiet: Callable[[TicketEntry], None] = lambda entry: None  # noqa: E731
    ledger = Ledger(
        blocks, BLOCK_SIZE, sys.maxsize, LEASE_S, lambda: 0.0, on_committed=quiet, on_failed=quiet, on_settled=lambda: None
    )
    entry = ledger.reserve(b"r", (1,), 4 * BLOCK_SIZE)
    assert entry is not None
    assert len(entry.block_table) == 4
