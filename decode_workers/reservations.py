"""From a router's Reserve to a ticket, or to the reason why there is none.

A reservation that the worker could never serve is a mistake of the request. One that it has no room for now is refused with a
time to come back, and so is every one while the worker drains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decode_workers.ledger import Ledger
from decode_workers.ticket_entry import TicketEntry
from protocol.errors import InvalidRequestError, OverloadedError, TandemError
from protocol.messages import Failed, Reserve, Reserved, Ticket, WorkerRef


class Reservations:
    """Answers every Reserve of one worker. `send` takes a peer's wire identity and a message."""

    def __init__(
        self, me: WorkerRef, ledger: Ledger, *, vocab_size: int, block_size: int, send: Callable[[bytes, Any], None]
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._send = send
        self.draining = False
        """No reservation is granted any more."""

    def ask(self, router: bytes, message: Reserve) -> bool:
        """Answer a router's Reserve with Reserved or Failed. Returns whether a ticket was granted."""
        try:
            entry = self._reserve(router, message)
        except TandemError as error:
            self._send(router, Failed.from_error(message.call_id, error))
            return False
        ticket = Ticket(
            ticket_id=entry.ticket_id,
            transfer_id=entry.transfer_id,
            worker=self._me,
            block_size=self._block_size,
            block_table=tuple(entry.block_table),
            num_prompt_tokens=len(entry.token_ids),
            held_tokens=entry.held_tokens,
        )
        self._send(router, Reserved(message.call_id, ticket))
        return True

    def _reserve(self, router: bytes, message: Reserve) -> TicketEntry:
        self._check(message)
        entry = None
        if not self.draining:
            entry = self._ledger.reserve(
                router,
                message.prompt_token_ids,
                message.max_tokens,
                message.cache_salt,
                message.trace.trace_id,
                own_tokens=message.own_tokens,
            )
        if entry is None:
            raise OverloadedError(f"full: {self._ledger.reservable_blocks} KV blocks may be reserved", retry_after_s=1.0)
        return entry

    def _check(self, message: Reserve) -> None:
        message.trace.check()
        num_tokens = len(message.prompt_token_ids)
        if not message.prompt_token_ids or message.max_tokens < 1:
            raise InvalidRequestError("a reservation needs at least one prompt token and one token of answer")
        if not 0 <= min(message.prompt_token_ids) <= max(message.prompt_token_ids) < self._vocab_size:
            raise InvalidRequestError(f"token ids must lie in [0, {self._vocab_size})", param="prompt")
        if not 0 <= message.own_tokens <= num_tokens:
            raise InvalidRequestError(f"{message.own_tokens} of {num_tokens} tokens can't be the ticket's own")
        if not self._ledger.fits(num_tokens, message.max_tokens):
            raise InvalidRequestError(
                f"prompt ({num_tokens}) and max_tokens ({message.max_tokens}) take more than the "
                f"{self._ledger.total_blocks} KV blocks that this worker has in all",
                param="max_tokens",
            )
