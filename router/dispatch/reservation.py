"""KV blocks that a decode worker keeps for one choice, and how they are asked for and given back."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from protocol.errors import OverloadedError, TenantFullError, UnavailableError
from protocol.messages.decode import Reserve
from protocol.messages.workers import Ticket
from router.dispatch.journal import Journal
from router.dispatch.links import WorkerLink
from router.rules.fair_queue import SchedulingClass
from router.rules.shares import share_of
from telemetry.logging import fields

log = logging.getLogger(__name__)

_PAUSE_S_PER_TOKEN = 4e-6
_LONGEST_PAUSE_S = 0.5
"""Less than a worker keeps room that it has made for a newcomer (`decode_workers.room`)."""


@dataclass(frozen=True)
class Room:
    """What is wanted of a decode worker for one choice."""

    token_ids: tuple[int, ...]
    """Prompt and what was emitted."""
    max_tokens: int
    """The most tokens that the answer may still get."""
    num_blocks: int
    """Blocks for all of these tokens and the answer's beginning."""
    own_tokens: int = 0
    """So many at the end of `token_ids` must lie in blocks of the ticket's own, as `protocol.messages.decode.Reserve` says."""
    displaces: bool = False
    """Whether streams of the worker may be preempted to make room for it."""


@dataclass(frozen=True)
class Reservation:
    """Blocks at a decode worker, counted as outstanding there until `release`, which must be called once."""

    decode: WorkerLink
    ticket: Ticket
    num_blocks: int

    def release(self) -> None:
        """Give the ticket back, also when the worker is gone."""
        self.decode.calls.release(self.ticket.ticket_id)
        self.decode.claims.done(self.num_blocks)


@dataclass
class Asking:
    """The decode workers that one attempt asks for room, look after look.

    One that has refused is left alone for a while that goes by the number of tokens: it decodes and hashes them all each time,
    beside its steps, and reports its load many times a second.
    """

    num_tokens: int
    scheduling_class: SchedulingClass
    asked: list[WorkerLink] = field(default_factory=list)
    """Those that the present look has come to, whether they were asked or left alone."""
    _refusals: dict[WorkerLink, tuple[float, bool]] = field(default_factory=dict)
    """When each refused, and whether that was for the tenant's own streams."""

    def may_ask(self, decode: WorkerLink, now: float) -> bool:
        """Come to a worker at a time in seconds, and tell whether to ask it."""
        self.asked.append(decode)
        refused_at, for_tenant = self._refusals.get(decode, (-math.inf, False))
        if now - refused_at >= min(_PAUSE_S_PER_TOKEN * self.num_tokens, _LONGEST_PAUSE_S):
            return self.scheduling_class not in decode.claims.turned_away
        if for_tenant:
            decode.claims.turn_away(self.scheduling_class)  # a report since then does not say otherwise
        return False

    def refused(self, decode: WorkerLink, now: float) -> None:
        """Note that the worker has granted nothing."""
        self._refusals[decode] = now, self.scheduling_class in decode.claims.turned_away


async def reserve(decode: WorkerLink, attempt_id: str, journal: Journal, room: Room, patience_s: float) -> Reservation | None:
    """Ask a decode worker for blocks, for up to `patience_s` seconds; None if it is full, slow to answer, leaving or lost."""
    ticket = None
    decode.claims.give(room.num_blocks)
    try:
        ticket = await decode.calls.reserve(
            lambda call_id: Reserve(
                call_id=call_id,
                request_id=attempt_id,
                prompt_token_ids=room.token_ids,
                max_tokens=room.max_tokens,
                cache_salt=journal.cache_salt,
                trace=journal.trace,
                own_tokens=room.own_tokens,
                share=share_of(journal.scheduling_class),
                displaces=room.displaces,
            ),
            patience_s,
        )
    except TenantFullError:
        decode.claims.turn_away(journal.scheduling_class)
    except OverloadedError:
        decode.claims.refuse(room.num_blocks)
    except UnavailableError as error:
        decode.claims.refuse(0)
        log.info("no reservation: %s", error.message, extra=fields(trace=journal.trace.trace_id))
    finally:
        if ticket is None:
            decode.claims.done(room.num_blocks)
    return None if ticket is None else Reservation(decode, ticket, room.num_blocks)
