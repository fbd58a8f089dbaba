"""One ticket's row in the books of a decode worker. `decode_workers.ledger` alone changes it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from protocol.ticket import TicketState


@dataclass
class TicketEntry:
    ticket_id: int
    transfer_id: int
    owner: bytes
    """Wire identity of the router that reserved it."""
    token_ids: tuple[int, ...]
    """Prompt and earlier answer, whose KV is to be there at the commit. A stream that migrates adds what it says meanwhile."""
    max_tokens: int
    """The reservation is for an answer of up to so many tokens beyond `token_ids`."""
    cache_salt: str
    """Only tickets of the same salt share blocks."""
    keys: list[bytes]
    """Of full blocks, from the first on, for the prefix cache: the prompt's, later also the answer's."""
    held_tokens: int
    """At the prompt's beginning, that were cached here when it was reserved."""
    block_table: list[int]
    deadline: float
    """When the present state must have been left, on the worker's clock."""
    trace_id: str
    """Of the request, for log lines."""
    state: TicketState = TicketState.RESERVED
    announced_tokens: int = 0
    """From the beginning on: held, or part of a push."""
    received_tokens: int = 0
    """Likewise: held, or arrived."""
    pushes_in_flight: int = 0
    in_step: bool = False
    """The engine is computing a step that writes into its blocks."""
    sending: bool = False
    """Its stream migrates: its blocks are read for another worker."""
    source: bytes | None = None
    """Wire identity of the worker that fills it."""
    digests: defaultdict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    """Fingerprints of what has arrived so far, by lane."""

    def __post_init__(self) -> None:
        self.announced_tokens = self.received_tokens = self.held_tokens

    def arrived(self, lane: int, digests: bytes) -> None:
        """A push has brought this on a lane."""
        self.digests[lane] += digests

    @property
    def quarantined(self) -> bool:
        return self.in_step or self.sending or self.pushes_in_flight > 0

    @property
    def preempted(self) -> bool:
        return self.state is TicketState.ATTACHED and not self.block_table
