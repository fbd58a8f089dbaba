"""What an audit asks every worker, and what a worker answers: its books, as they are at one moment of its loop.

    router ──Audit──► worker ──Books──► router

`router.rules.leaks` compares the answers with each other and with what the router itself holds. What a worker can see alone, it
says in `problems`. No prompt and no token is in any of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.codec import message
from protocol.ticket import TicketState


class Owner(Enum):
    """Whose ticket it is. A router does not know its own wire identity, so the worker says whether it is the asker's."""

    ASKER = "asker"
    OTHER = "other"
    """The ticket belongs to another router that is connected."""
    NOBODY = "nobody"
    """The ticket belongs to a router whose connection is gone."""


@dataclass(frozen=True)
class TicketRow:
    """One ticket that a worker has granted: it decodes."""

    ticket_id: int
    transfer_id: int
    owner: Owner
    state: TicketState
    num_blocks: int
    """Blocks that the ticket holds; 0 while its stream is preempted."""
    pushes_in_flight: int
    in_step: bool
    computes_here: bool
    """Its prompt is computed where it is, as soon as its grammar is ready: it waits for no KV."""
    overdue_s: float
    """How long ago its deadline was; negative while it has time. A final ticket's is a lease after the last thing that
    happened to it; an attached one's means nothing."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt that a worker computes for another one, until its KV is handed over."""

    ticket_id: int
    transfer_id: int
    decode_id: str
    decode_epoch: int
    num_blocks: int
    """Blocks that the prompt holds; 0 while it is queued."""
    in_step: bool
    stopped: bool
    """It was cancelled or has failed, and leaves once no step and no push reads its blocks."""


@dataclass(frozen=True)
class SendRow:
    """One stream that a worker hands over to another, until that has its KV."""

    ticket_id: int
    """Ticket of the other worker. The fields that follow are the other worker's, too."""
    transfer_id: int
    decode_id: str
    decode_epoch: int


@dataclass(frozen=True)
class PinRow:
    """Blocks that a worker owns for no prompt or ticket: they are read for another worker or a tier, or filled from there."""

    purpose: str
    num_blocks: int
    overdue_s: float
    """How long ago its lease ended; negative while it has time."""


@dataclass(frozen=True)
class PairRow:
    """One channel by which a worker sends: to a decode worker, or to one that fetches blocks."""

    decode_id: str
    decode_epoch: int
    pushes_in_flight: int


@message(40)
@dataclass(frozen=True)
class Audit:
    call_id: int


@message(41)
@dataclass(frozen=True)
class Books:
    call_id: int
    total_blocks: int
    free_blocks: int
    """Blocks that nobody owns, with those that are cached and idle."""
    owned_blocks: int
    """Blocks to which there is at least one reference."""
    references: int
    """A block that n tickets, prompts and pins share has n."""
    tickets: tuple[TicketRow, ...] = ()
    sends: tuple[SendRow, ...] = ()
    prompts: tuple[PromptRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    pins: tuple[PinRow, ...] = ()
    problems: tuple[str, ...] = ()
