"""One ticket's row in the books of a decode worker. The ledger and `AttachedTickets` alone change it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.memory.block_table import BlockTable
from protocol.share import Share
from protocol.ticket import TicketState


@dataclass
class TicketEntry:
    """One ticket: what it was granted for, its blocks, and how far it has come."""

    ticket_id: int
    transfer_id: int
    owner: bytes
    """Wire identity of the router that reserved it."""
    token_ids: tuple[int, ...]
    """Prompt and earlier answer, whose KV is to be there at the commit. A migrating stream adds what it generates meanwhile."""
    max_tokens: int
    """Largest number of tokens beyond `token_ids` that the reservation is for."""
    cache_salt: str
    """Only tickets of the same salt share blocks."""
    share: Share
    """The tenant's right to seats and blocks."""
    keys: list[bytes]
    """Keys of its full blocks for the prefix cache, from the first on: the prompt's, and later the answer's too."""
    held_tokens: int
    """Number of leading tokens that were cached here when the ticket was reserved."""
    unseen_tokens: int
    """Number of leading tokens that the first one to be generated no longer sees. If KV is sent, theirs is not."""
    block_table: BlockTable
    deadline: float
    """Time on the worker's clock by which the present state must have been left."""
    trace_id: str
    """The request's trace id, for log lines."""
    state: TicketState = TicketState.RESERVED
    announced_tokens: int = 0
    """Number of leading tokens that are held, unseen or part of a push."""
    received_tokens: int = 0
    """Number of leading tokens that are held, unseen or have arrived."""
    pushes_in_flight: int = 0
    in_step: bool = False
    """Whether the engine is computing a step that writes into its blocks."""
    sending: bool = False
    """Whether its blocks are read for another worker."""
    wanted_from: int | None = None
    """Position of the first token whose KV another worker waits for, so that it is kept although it is not seen any more."""
    filling: bool = False
    """Whether blocks of a tier are being read into its own."""
    mixed: bool = False
    """Whether some of its KV was computed by another arithmetic. Then nothing of it is cached for others."""
    source: bytes | None = None
    """Wire identity of the worker that fills it."""
    digests: defaultdict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    """Fingerprints of what has arrived so far, by lane."""

    def __post_init__(self) -> None:
        self.announced_tokens = self.received_tokens = self.sent_from

    def arrived(self, lane: int, digests: bytes) -> None:
        """Add the fingerprints of what a push has brought on this lane."""
        self.digests[lane] += digests

    @property
    def sent_from(self) -> int:
        """Position of the first token whose KV is sent, if that of the prompt is."""
        return max(self.held_tokens, self.unseen_tokens)

    @property
    def quarantined(self) -> bool:
        """Whether something may still read or write its blocks."""
        return self.in_step or self.sending or self.filling or self.pushes_in_flight > 0

    @property
    def preempted(self) -> bool:
        """Whether it is attached and has lost its blocks."""
        return self.state is TicketState.ATTACHED and not self.block_table
