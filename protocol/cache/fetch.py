"""How a worker gets cached blocks out of another worker's pool.

    borrower ──Fetch──► lender                  the blocks' keys, and a ticket of the borrower's own
    borrower ◄── pushes, commit ── lender       as for any transfer (`kv_transfer`): layer by layer, with fingerprints
    borrower ◄──Fetched── lender                how much of it there was

The lender pins the blocks while it sends them. What it does not hold it does not send: the borrower computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.messages.workers import Ticket


@message(72)
@dataclass(frozen=True)
class Fetch:
    """Ask for the KV of a prompt's beginning, whose blocks the asked worker is thought to hold."""

    call_id: int
    ticket: Ticket
    """The borrower's. What it holds already is not sent."""
    keys: tuple[bytes, ...]
    """Keys of all full blocks that are wanted, from the prompt's first on."""


@message(73)
@dataclass(frozen=True)
class Fetched:
    """The KV is at the borrower, committed."""

    call_id: int
    num_tokens: int
    """Tokens that the borrower holds now, from the prompt's first on, with those that it held before."""
