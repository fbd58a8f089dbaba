"""What tickets in the batch get and lose, one after the other; `test_ledger.py` has all of it in any order."""

from __future__ import annotations

from decode_workers.attached_tickets import AttachedTickets
from decode_workers.ledger import Ledger
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys
from tests.unit.counted_keys import CountedKeys
from tests.unit.decode_workers.small_ledger import BLOCK_SIZE, LEASE_S, NUM_BLOCKS, WINDOW, book, receive


def test_a_preempted_ticket_holds_nothing_and_comes_back() -> None:
    ledger, blocks = book()
    attached = AttachedTickets(ledger)
    entry = ledger.reserve(b"r", (1,), 40, "")
    assert entry is not None
    ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, 0, 1)
    ledger.end_push(entry.ticket_id, 1, ok=True)
    ledger.commit(entry.ticket_id, entry.transfer_id, 1)
    attached.attach(entry.ticket_id)
    assert (ledger.blocks.num_free, ledger.num_holders) == (NUM_BLOCKS - 1, 1)
    attached.preempt(entry.ticket_id)
    assert (ledger.blocks.num_free, ledger.num_holders) == (NUM_BLOCKS, 0)
    assert attached.readmit(entry.ticket_id, 9, 8, spare=NUM_BLOCKS) is None, "that many would not stay free"
    assert attached.readmit(entry.ticket_id, 9, 8, spare=0) == 0
    attached.preempt(entry.ticket_id)
    ledger.release(entry.ticket_id)
    assert (blocks.num_free, ledger.num_holders) == (NUM_BLOCKS, 0), "it left while it waited"


def test_an_answer_is_kept_for_the_next_turn() -> None:
    ledger, _ = book()
    attached = AttachedTickets(ledger)
    prompt, answer = tuple(range(BLOCK_SIZE)), tuple(range(100, 100 + BLOCK_SIZE))
    entry = ledger.reserve(b"r", prompt, BLOCK_SIZE, "")
    assert entry is not None
    assert receive(ledger, entry)
    attached.attach(entry.ticket_id)
    attached.grow(entry.ticket_id, 2 * BLOCK_SIZE)
    attached.keep(entry.ticket_id, prompt + answer, len(prompt + answer))
    ledger.release(entry.ticket_id)
    turn = ledger.reserve(b"r", (*prompt, *answer, 7), 1, "")
    assert turn is not None
    assert turn.held_tokens == 2 * BLOCK_SIZE


def test_a_stream_that_others_wait_for_keeps_what_it_no_longer_sees() -> None:
    ledger, cache = book(window=WINDOW)
    attached = AttachedTickets(ledger)
    entry = ledger.reserve(b"r", tuple(range(10)), 40, "")
    assert entry is not None
    assert (entry.unseen_tokens, entry.block_table.first, entry.block_table.num_owned) == (4, 1, 3)
    assert receive(ledger, entry)
    attached.attach(entry.ticket_id)
    attached.want(entry.ticket_id, 4)
    assert attached.grow(entry.ticket_id, 20, 19)
    assert attached.begins_at(entry.ticket_id) == 4
    attached.want(entry.ticket_id, None)
    attached.begin_send(entry.ticket_id)
    assert attached.grow(entry.ticket_id, 20, 19)
    assert attached.begins_at(entry.ticket_id) == 4
    attached.end_send(entry.ticket_id)
    assert attached.grow(entry.ticket_id, 20, 19)
    assert attached.begins_at(entry.ticket_id) == 12, "two tokens less than it sees begin in the block from 16 on, and reach 4"
    assert cache.num_free == NUM_BLOCKS - 2
    attached.want(99, 4)


def test_a_stream_that_others_wait_for_is_computed_anew_with_no_more_blocks_than_others() -> None:
    ledger, cache = book(window=WINDOW)
    attached = AttachedTickets(ledger)
    entry = ledger.reserve(b"r", tuple(range(33)), 40, "")
    assert entry is not None
    assert receive(ledger, entry)
    attached.attach(entry.ticket_id)
    attached.want(entry.ticket_id, 28)
    attached.preempt(entry.ticket_id)
    cache.reset()
    assert attached.readmit(entry.ticket_id, 33, 33) == 0
    for computed in range(0, 60, 2):
        assert attached.grow(entry.ticket_id, computed + 2, computed)
        assert entry.block_table.num_owned <= ledger.blocks.at_once(100)
    assert attached.begins_at(entry.ticket_id) > 28, "who waited for the lost KV is told so"


def test_what_was_handed_over_without_its_beginning_serves_a_next_turn() -> None:
    ledger, _ = book(window=WINDOW)
    attached = AttachedTickets(ledger)
    entry = ledger.reserve(b"r", tuple(range(32)), 1, "")
    assert entry is not None
    assert (entry.held_tokens, entry.sent_from) == (0, 28)
    assert receive(ledger, entry)
    ledger.release(entry.ticket_id)
    turn = ledger.reserve(b"r", tuple(range(33)), 1, "", own_tokens=1)
    assert turn is not None
    assert (turn.held_tokens, turn.block_table.first) == (32, 7)
    assert attached.computable(turn)
    sent = ledger.reserve(b"r", tuple(range(100, 140)), 1, "")
    assert sent is not None
    assert not attached.computable(sent)
    assert attached.attach_here(sent.ticket_id) is None


def test_keeping_a_chunk_touches_only_the_keys_of_its_blocks() -> None:
    num_blocks = 500
    cache = PrefixCache(num_blocks + 1)
    ledger = Ledger(cache, BLOCK_SIZE, LEASE_S, lambda: 0.0, lambda _: None, lambda _: None, lambda: None)
    attached = AttachedTickets(ledger)
    prompt = tuple(range(num_blocks * BLOCK_SIZE))
    entry = ledger.reserve(b"r", prompt, 1, "")
    assert entry is not None
    assert attached.attach_here(entry.ticket_id) is entry
    entry.keys = keys = CountedKeys(entry.keys)
    for start in range(0, len(prompt), 2 * BLOCK_SIZE):
        attached.keep(entry.ticket_id, prompt, start + 2 * BLOCK_SIZE, start)
        assert keys.reads == 2
        keys.reads = 0
    assert entry.keys is keys
    assert cache.match(block_keys(prompt, BLOCK_SIZE, "")) == num_blocks
