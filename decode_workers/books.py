"""The decode role's part of a worker's books for an audit (`protocol.audit`): whose tickets there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from decode_workers.ledger import Ledger
from decode_workers.scheduler import DecodeScheduler
from protocol.audit import Owner, SendRow, TicketRow
from protocol.ticket import TicketState
from worker.roles import RoleBooks


def decode_books(
    asker: bytes,
    ledger: Ledger,
    scheduler: DecodeScheduler,
    waiting_attaches: Mapping[int, bool],
    sends: tuple[SendRow, ...],
    is_connected: Callable[[bytes], bool],
    problems: tuple[str, ...] = (),
) -> RoleBooks:
    """What is held for tickets, all at one moment, as an audit compares it.

    `asker` is the wire identity of the router that asks. `waiting_attaches` are the tickets whose streams have not started;
    the value tells whether the prompt is computed here. `problems` were found in other books of the role.
    """
    now = time.monotonic()

    def owner(router: bytes) -> Owner:
        if router == asker:
            return Owner.ASKER
        return Owner.OTHER if is_connected(router) else Owner.NOBODY

    tickets = tuple(
        TicketRow(
            ticket_id=entry.ticket_id,
            transfer_id=entry.transfer_id,
            owner=owner(entry.owner),
            state=entry.state,
            num_blocks=entry.block_table.num_owned,
            pushes_in_flight=entry.pushes_in_flight,
            in_step=entry.in_step,
            computes_here=waiting_attaches.get(entry.ticket_id, False),
            overdue_s=now - entry.deadline,
        )
        for entry in ledger
    )
    return RoleBooks(
        tables=[entry.block_table.owned for entry in ledger],
        tickets=tickets,
        sends=sends,
        problems=(*problems, *_problems(ledger, scheduler, waiting_attaches)),
    )


def _problems(ledger: Ledger, scheduler: DecodeScheduler, waiting_attaches: Mapping[int, bool]) -> Iterator[str]:
    try:
        ledger.check_tickets()
    except AssertionError as error:
        yield str(error)
    attached = [entry.ticket_id for entry in ledger if entry.state is TicketState.ATTACHED]
    for ticket_id in attached:
        if ticket_id not in scheduler:
            yield f"ticket {ticket_id} is attached, but has no stream"
    without_ticket = len(scheduler) - sum(ticket_id in scheduler for ticket_id in attached)
    if without_ticket:
        yield f"{without_ticket} streams have no attached ticket"
    for ticket_id in waiting_attaches:
        if ledger.find(ticket_id) is None:
            yield f"an attach waits for ticket {ticket_id}, which is gone"
