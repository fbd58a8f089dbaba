"""A ledger over a small pool, for tests of its own books and of the tickets in the batch."""

from __future__ import annotations

from collections.abc import Callable

from configs.model_files.kv_window import WHOLE, KvWindow
from decode_workers.ledger import Ledger
from decode_workers.ticket_entry import TicketEntry
from engine.memory.prefix_cache import PrefixCache

BLOCK_SIZE = 4
NUM_BLOCKS = 12
LEASE_S = 10.0
WINDOW = KvWindow(4, unit=4, late=2)
"""A token sees four to seven tokens before it, and streams keep two more."""


def book(
    lease_s: float = LEASE_S, clock: Callable[[], float] = lambda: 0.0, window: KvWindow = WHOLE
) -> tuple[Ledger, PrefixCache]:
    cache = PrefixCache(NUM_BLOCKS)
    quiet: Callable[[TicketEntry], None] = lambda entry: None  # noqa: E731
    ledger = Ledger(
        cache,
        BLOCK_SIZE,
        lease_s,
        clock,
        on_committed=quiet,
        on_failed=quiet,
        on_settled=lambda: None,
        window=window,
    )
    return ledger, cache


def receive(ledger: Ledger, entry: TicketEntry) -> bool:
    """The whole transfer of what is not held, and its commit."""
    start, num_tokens = entry.sent_from, len(entry.token_ids)
    if start < num_tokens:
        assert ledger.begin_push(b"p", entry.ticket_id, entry.transfer_id, start, num_tokens - start) is entry
        ledger.end_push(entry.ticket_id, num_tokens - start, ok=True)
    return ledger.commit(entry.ticket_id, entry.transfer_id, num_tokens)
