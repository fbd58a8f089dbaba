"""From a router's Reserve to a ticket, or to the reason why there is none.

A reservation that the worker could never serve is a mistake of the request. It is refused with a time to come back

- while the worker drains;
- if the tenant's streams wait for their turns, or for their blocks after a preemption, longer than `turn_s` as things stand;
- if too few blocks are free. Then the scheduler looks whether others have to make room for it, and the router asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from decode_workers.ticket_entry import TicketEntry
from protocol.cache.keys import block_keys
from protocol.errors import InvalidRequestError, OverloadedError, TandemError, TenantFullError
from protocol.messages.common import Failed
from protocol.messages.decode import Reserve, Reserved
from protocol.messages.workers import Ticket, WorkerRef


class Reservations:
    """Answers every Reserve of one worker. `send` takes a peer's wire identity and a message."""

    def __init__(
        self,
        me: WorkerRef,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        *,
        vocab_size: int,
        block_size: int,
        turn_s: float,
        send: Callable[[bytes, Any], None],
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._scheduler = scheduler
        self._turn_s = turn_s
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
            unseen_tokens=entry.unseen_tokens,
        )
        self._send(router, Reserved(message.call_id, ticket))
        return True

    def _reserve(self, router: bytes, message: Reserve) -> TicketEntry:
        self._check(message)
        share, room = message.share, self._scheduler.room
        if self.draining:
            raise OverloadedError("the worker is leaving", retry_after_s=1.0)
        wait_s = self._scheduler.wait_s(share)
        if wait_s > self._turn_s:
            raise TenantFullError(f"full: a stream would wait for its turn for {wait_s:.3g} s", retry_after_s=1.0)
        entry = self._ledger.reserve(
            router,
            message.prompt_token_ids,
            message.max_tokens,
            message.cache_salt,
            message.trace.trace_id,
            own_tokens=message.own_tokens,
            share=share,
            spare=room.spare_beside(share, displaces=message.displaces),
        )
        if entry is None:
            if message.displaces:
                num_tokens, max_tokens = len(message.prompt_token_ids), message.max_tokens
                keys = block_keys(message.prompt_token_ids, self._block_size, message.cache_salt)
                cost = partial(self._ledger.blocks.reserve_cost, keys, num_tokens, max_tokens, message.own_tokens)
                room.want(share, self._ledger.blocks.most_reserved(num_tokens, max_tokens), cost)
            kind = TenantFullError if room.holds_most(share) else OverloadedError
            raise kind(f"full: {room.reservable_blocks} KV blocks may be reserved", retry_after_s=1.0)
        if message.displaces:
            room.granted(share)
        return entry

    def _check(self, message: Reserve) -> None:
        message.trace.check()
        message.share.check()
        num_tokens = len(message.prompt_token_ids)
        if not message.prompt_token_ids or message.max_tokens < 1:
            raise InvalidRequestError("a reservation needs at least one prompt token and one token of answer")
        if not 0 <= min(message.prompt_token_ids) <= max(message.prompt_token_ids) < self._vocab_size:
            raise InvalidRequestError(f"token ids must lie in [0, {self._vocab_size})", param="prompt")
        if not 0 <= message.own_tokens <= num_tokens:
            raise InvalidRequestError(f"{message.own_tokens} of {num_tokens} tokens can't be the ticket's own")
        if not self._ledger.blocks.fits(num_tokens, message.max_tokens):
            raise InvalidRequestError(
                f"prompt ({num_tokens}) and max_tokens ({message.max_tokens}) take more than the "
                f"{self._ledger.blocks.total} KV blocks that this worker has in all",
                param="max_tokens",
            )
