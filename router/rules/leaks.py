"""What is held in the cluster though nobody needs it, found by comparing the books of all workers. Pure.

A block belongs to a ticket, a prompt, or a pin under a lease. A prompt works for a ticket. A ticket waits for its prompt or for
a stream that migrates, or it is attached and belongs to a router that still wants it. `find_leaks` names every place where
this chain is broken, each once.

The books of different workers are not taken at one instant, and messages are under way between them. So one comparison may find
a request that is on the move; `router.dispatch.of_all` counts only what several in a row find (`Leak.key` says what is equal).

What is not judged:
- Claims of other routers, because each router knows only its own. Their tickets are checked for everything else.
- What only a worker that did not answer could tell. Its silence is a finding itself.
- A claim whose ticket lapsed before it was attached. It holds nothing, and the attach will find out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.audit import Books, Owner, PinRow, PromptRow, SendRow, TicketRow
from protocol.messages.workers import WorkerLife, WorkerRef
from protocol.ticket import TicketState


@dataclass(frozen=True)
class Audited:
    """What an audit learned about one worker."""

    ref: WorkerRef
    books: Books | None
    """The worker's books; None if it did not answer."""
    claims: Mapping[int, bool] = field(default_factory=dict)
    """Ids of the tickets that this router holds at a decode worker, each with whether the router waits for its tokens."""

    @property
    def life(self) -> WorkerLife:
        """Which life of the worker this is about."""
        return self.ref.life


@dataclass(frozen=True)
class Leak:
    """One thing that is held though nobody needs it, or one contradiction between books."""

    kind: str
    worker_id: str
    epoch: int
    subject: str
    """The part of the worker that this is about, such as `ticket 7`; empty if it is the worker as a whole."""
    num_blocks: int
    """KV blocks that it keeps from others; 0 if there are none, or if that is not known."""
    message: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Identity of the leak, the same in every snapshot that finds it."""
        return self.kind, self.worker_id, self.epoch, self.subject


def find_leaks(workers: Sequence[Audited], lease_s: float, patience_s: float) -> list[Leak]:
    """Find every inconsistency of one snapshot, worker by worker. `patience_s` is how long the workers had to answer."""
    everybody = _Everybody(_transfers_by_life(workers), _expected_transfers(workers))
    return [leak for worker in workers for leak in _leaks_of(worker, everybody, lease_s, patience_s)]


@dataclass(frozen=True)
class _Everybody:
    """What the books of all workers say together."""

    tickets: Mapping[WorkerLife, Collection[tuple[int, int]] | None]
    """Ticket and transfer id of each ticket, by life; None for a worker that did not answer."""
    expected: Collection[tuple[WorkerLife, int]] | None
    """Tickets that some prompt or migrating stream is meant for; None if a worker that may have more did not answer."""


def _leaks_of(worker: Audited, everybody: _Everybody, lease_s: float, patience_s: float) -> Iterator[Leak]:
    books = worker.books
    if books is None:
        yield _leak("silent", worker, f"did not answer within {patience_s:g} s")
        return
    found = _block_leaks(worker, books)
    yield from _pin_leaks(worker, books, lease_s)
    yield from _ticket_leaks(worker, books, everybody.expected, lease_s)
    yield from _send_leaks(worker, books, everybody.tickets)
    yield from _prompt_leaks(worker, books, everybody.tickets)
    yield from found
    if not found:  # the worker's own check would say the same in fewer words
        for problem in books.problems:
            yield _leak("books", worker, f"contradicts itself: {problem}", problem)


def _block_leaks(worker: Audited, books: Books) -> list[Leak]:
    found = []
    missing = books.total_blocks - books.free_blocks - books.owned_blocks
    if missing:
        count = f"{missing} blocks are lost" if missing > 0 else f"{-missing} blocks are too many"
        sums = f"{books.free_blocks} free and {books.owned_blocks} owned of {books.total_blocks}"
        found.append(_leak("blocks", worker, f"has {sums}: {count}", num_blocks=max(0, missing)))
    rows: tuple[TicketRow | PromptRow | PinRow, ...] = (*books.tickets, *books.prompts, *books.pins)
    held = sum(row.num_blocks for row in rows)
    if books.references != held:
        sentence = f"counts {books.references} references to blocks, but its tickets, prompts and pins hold {held}"
        found.append(_leak("references", worker, sentence))
    return found


def _pin_leaks(worker: Audited, books: Books, lease_s: float) -> Iterator[Leak]:
    """Pins that nobody gives back, at most one for each purpose."""
    for purpose in sorted({pin.purpose for pin in books.pins}):
        overdue = [pin for pin in books.pins if pin.purpose == purpose and pin.overdue_s > lease_s]
        if overdue:
            blocks, longest = sum(pin.num_blocks for pin in overdue), max(pin.overdue_s for pin in overdue)
            sentence = f"pins {blocks} blocks ({purpose}) that should have been given back {longest:.0f} s ago"
            yield _leak("pin", worker, sentence, f"pins ({purpose})", blocks)


def _ticket_leaks(
    worker: Audited, books: Books, transfers: Collection[tuple[WorkerLife, int]] | None, lease_s: float
) -> Iterator[Leak]:
    """Leaks of the worker's tickets, at most one for each; of several reasons the plainest."""
    for row in books.tickets:
        reason = _why_not(row, worker, transfers, lease_s)
        if reason is not None:
            kind, sentence = reason
            blocks = f"{row.num_blocks} blocks, {row.state.value}"
            subject = f"ticket {row.ticket_id}"
            yield _leak(kind, worker, f"{subject} ({blocks}) {sentence}", subject, row.num_blocks)
    known = {row.ticket_id for row in books.tickets}
    for ticket_id, waits in worker.claims.items():
        if waits and ticket_id not in known:
            subject = f"ticket {ticket_id}"
            yield _leak("stream", worker, f"owes tokens of {subject}, but has no such ticket", subject)


def _why_not(
    row: TicketRow, worker: Audited, transfers: Collection[tuple[WorkerLife, int]] | None, lease_s: float
) -> tuple[str, str] | None:
    """Kind and reason if nobody needs this ticket, else None."""
    if row.state is not TicketState.ATTACHED and row.overdue_s > lease_s:
        return "overdue", f"should have gone {row.overdue_s:.0f} s ago; {row.pushes_in_flight} pushes write into it"
    if row.state.final:
        return None  # quarantined, within its time
    if row.owner is Owner.NOBODY:
        return "owner", "belongs to a router that is gone"
    if row.owner is Owner.ASKER and row.ticket_id not in worker.claims:
        return "claim", "belongs to this router, which has no request for it"
    waits = row.state in (TicketState.RESERVED, TicketState.RECEIVING)
    if waits and not row.computes_here and transfers is not None and (worker.life, row.ticket_id) not in transfers:
        return "transfer", "waits for KV that no worker has a prompt or a stream for"
    return None


def _expected_transfers(workers: Sequence[Audited]) -> Collection[tuple[WorkerLife, int]] | None:
    """Tickets that some prompt or migrating stream is meant for, or None if a worker that may have more did not answer."""
    found: set[tuple[WorkerLife, int]] = set()
    for worker in workers:
        if worker.books is None:
            return None
        rows: tuple[PromptRow | SendRow, ...] = (*worker.books.prompts, *worker.books.sends)
        found |= {(WorkerLife(row.decode_id, row.decode_epoch), row.ticket_id) for row in rows}
    return found


def _send_leaks(
    worker: Audited, books: Books, transfers: Mapping[WorkerLife, Collection[tuple[int, int]] | None]
) -> Iterator[Leak]:
    """Streams that the worker hands over to a ticket that is not there."""
    for row in books.sends:
        ticket = f"ticket {row.ticket_id} of {row.decode_id} (epoch {row.decode_epoch})"
        known = transfers.get(WorkerLife(row.decode_id, row.decode_epoch), ())
        if known is not None and (row.ticket_id, row.transfer_id) not in known:
            yield _leak("send", worker, f"hands a stream over for {ticket}, which is not there", ticket)


def _prompt_leaks(
    worker: Audited, books: Books, transfers: Mapping[WorkerLife, Collection[tuple[int, int]] | None]
) -> Iterator[Leak]:
    pushes = {WorkerLife(pair.decode_id, pair.decode_epoch): pair.pushes_in_flight for pair in books.pairs}
    for row in books.prompts:
        life = WorkerLife(row.decode_id, row.decode_epoch)
        if row.stopped:
            if not row.in_step and not pushes.get(life):
                yield _prompt_leak("prompt", worker, row, "was stopped and is still there; nothing reads its blocks")
        elif life not in transfers:
            yield _prompt_leak("ticket", worker, row, "whose worker is not part of the cluster")
        else:
            known = transfers[life]
            if known is not None and (row.ticket_id, row.transfer_id) not in known:
                yield _prompt_leak("ticket", worker, row, f"which is unknown there with transfer {row.transfer_id}")
    rows: tuple[PromptRow | SendRow, ...] = (*books.prompts, *books.sends)
    wanted = {WorkerLife(row.decode_id, row.decode_epoch) for row in rows}
    lends = any(pin.purpose == "lent" for pin in books.pins)
    for (decode_id, epoch), count in pushes.items():
        if count and (decode_id, epoch) not in wanted and not lends:
            subject = f"pushes to {decode_id} (epoch {epoch})"
            yield _leak("pushes", worker, f"has {count} {subject} under way, but no prompt for it", subject)


def _transfers_by_life(workers: Sequence[Audited]) -> dict[WorkerLife, Collection[tuple[int, int]] | None]:
    return {worker.life: _transfers(worker.books) for worker in workers}


def _transfers(books: Books | None) -> Collection[tuple[int, int]] | None:
    """Ticket and transfer id of each ticket; None if the worker did not answer."""
    return None if books is None else {(row.ticket_id, row.transfer_id) for row in books.tickets}


def _prompt_leak(kind: str, worker: Audited, row: PromptRow, reason: str) -> Leak:
    ticket = f"ticket {row.ticket_id} of {row.decode_id} (epoch {row.decode_epoch})"
    return _leak(kind, worker, f"a prompt ({row.num_blocks} blocks) for {ticket}, {reason}", ticket, row.num_blocks)


def _leak(kind: str, worker: Audited, sentence: str, subject: str = "", num_blocks: int = 0) -> Leak:
    worker_id, epoch = worker.life
    return Leak(kind, worker_id, epoch, subject, num_blocks, f"{worker_id} (epoch {epoch}): {sentence}")
