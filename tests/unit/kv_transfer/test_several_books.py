"""Arrivals of one worker find the books that know them: its tickets, or its loans."""

from __future__ import annotations

import itertools
import time

from decode_workers.ledger import Ledger
from engine.memory.prefix_cache import PrefixCache
from kv_transfer.several_books import SeveralBooks

SENDER = b"sender"


def ledger(ids: itertools.count[int]) -> Ledger:
    def nothing(*_: object) -> None:
        return None

    return Ledger(
        PrefixCache(16), 8, 10.0, time.monotonic, on_committed=nothing, on_failed=nothing, on_settled=nothing, ids=ids
    )


def test_each_transfer_goes_into_the_books_that_know_it() -> None:
    ids = itertools.count(1)
    both = [ledger(ids), ledger(ids)]
    books = SeveralBooks()
    for each in both:
        books.add(each)
    first, second = (each.reserve(b"router", tuple(range(20)), 5, "") for each in both)
    assert first is not None
    assert second is not None
    assert first.ticket_id != second.ticket_id, "one counter for both"
    for entry in (second, first):
        assert books.begin_push(SENDER, entry.ticket_id, entry.transfer_id + 1, 0, 8, ()) is None, "nobody knows it"
        assert books.begin_push(SENDER, entry.ticket_id, entry.transfer_id, 0, 8, ()) is entry
        assert books.begin_push(SENDER, entry.ticket_id, entry.transfer_id, 8, 12, ()) is entry
        assert (entry.pushes_in_flight, books.fingerprints(entry.ticket_id, entry.transfer_id)) == (2, {})
        assert not books.commit(entry.ticket_id, entry.transfer_id, 20), "pushes are under way"
    assert books.pushes_in_flight == 4
    for num_tokens in (8, 12):
        books.end_push(first.ticket_id, num_tokens, ok=True)
    books.end_push(second.ticket_id, 8, ok=False)
    assert second.state.final
    assert books.pushes_in_flight == 1
    books.end_push(second.ticket_id, 12, ok=True)
    assert books.pushes_in_flight == 0
    assert books.fingerprints(second.ticket_id, second.transfer_id) is None
    assert books.commit(first.ticket_id, first.transfer_id, 20)
    books.abort_transfer(first.ticket_id, first.transfer_id)
    assert not first.state.final, "it was committed before"
    assert [len(each) for each in both] == [1, 0]
