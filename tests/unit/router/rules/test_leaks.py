"""The comparison of books: a consistent cluster gives nothing, each single corruption just its own finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.audit import Books, Owner, PairRow, PinRow, PromptRow, SendRow, TicketRow
from protocol.messages.workers import Role, WorkerRef
from protocol.ticket import TicketState
from router.rules.leaks import Audited, find_leaks

LEASE_S = 10.0
WAITING = (TicketState.RESERVED, TicketState.RECEIVING)


@st.composite
def clusters(draw: st.DrawFn) -> list[Audited]:
    """Any state that a sound cluster may be in: tickets of this and of other routers, prompts for those that wait."""
    prompts: dict[int, list[PromptRow]] = {n: [] for n in range(draw(st.integers(1, 3)))}
    decodes = []
    sends: list[SendRow] = []
    for number in range(draw(st.integers(1, 3))):
        decode, waiting = draw(decode_workers(number))
        decodes.append(decode)
        for row in waiting:
            if draw(st.booleans()):
                prompts[draw(st.sampled_from(sorted(prompts)))].append(draw(prompts_for(decode, row)))
            else:
                sends.append(SendRow(row.ticket_id, row.transfer_id, *decode.life))
    migrating = draw(st.integers(0, len(decodes) - 1))
    decodes[migrating] = change(decodes[migrating], sends=tuple(sends))
    return decodes + [draw(prefill_workers(number, rows)) for number, rows in prompts.items()]


@st.composite
def pins(draw: st.DrawFn) -> tuple[PinRow, ...]:
    """Within their time."""
    purposes = draw(st.lists(st.sampled_from(["lent", "fetched", "offloaded"]), max_size=3))
    return tuple(PinRow(purpose, draw(st.integers(1, 9)), draw(st.floats(-10, LEASE_S))) for purpose in purposes)


@st.composite
def decode_workers(draw: st.DrawFn, number: int) -> tuple[Audited, list[TicketRow]]:
    rows: list[TicketRow] = []
    claims = {}
    for ticket_id in range(1, draw(st.integers(0, 6)) + 1):
        state = draw(st.sampled_from([state for state in TicketState if state is not TicketState.EXPIRED]))
        owner = draw(st.sampled_from([Owner.ASKER, Owner.OTHER]))
        pushes = draw(st.integers(1, 2)) if state.final else 0
        blocks = draw(st.integers(0 if state is TicketState.ATTACHED else 1, 9))
        overdue_s = draw(st.floats(-10, 1000 if state is TicketState.ATTACHED else 1))
        rows.append(TicketRow(ticket_id, ticket_id + 1000, owner, state, blocks, pushes, False, False, overdue_s))
        if owner is Owner.ASKER and not state.final:
            claims[ticket_id] = state is TicketState.ATTACHED and draw(st.booleans())
    if draw(st.booleans()):
        claims[77] = False  # its ticket lapsed, or its stream has ended and is not read to the end
    pinned = draw(pins())
    free = draw(st.integers(0, 50))
    references = sum(row.num_blocks for row in rows) + sum(pin.num_blocks for pin in pinned)
    owned = references - draw(st.integers(0, references // 2))
    ref = WorkerRef(f"decode-{number}", draw(st.integers(1, 3)), "tcp://127.0.0.1:1")
    books = Books(1, free + owned, free, owned, references, tickets=tuple(rows), pins=pinned)
    return Audited(ref, books, claims), [row for row in rows if row.state in WAITING]


@st.composite
def prompts_for(draw: st.DrawFn, decode: Audited, row: TicketRow) -> PromptRow:
    blocks = draw(st.integers(0, 9))
    return PromptRow(row.ticket_id, row.transfer_id, *decode.life, blocks, in_step=blocks > 0, stopped=False)


@st.composite
def prefill_workers(draw: st.DrawFn, number: int, rows: list[PromptRow]) -> Audited:
    """Some prompts were stopped and are on their way out: in a step, or a push still reads them."""
    lives = {(row.decode_id, row.decode_epoch) for row in rows}
    pairs = [PairRow(*life, draw(st.integers(1, 3))) for life in sorted(lives)]
    pairs.append(PairRow("decode-idle", 1, 0))
    stopped: bool = draw(st.booleans())
    if lives and stopped:
        rows = [*rows, PromptRow(500, 1500, pairs[0].decode_id, pairs[0].decode_epoch, 2, in_step=False, stopped=True)]
    if draw(st.booleans()):
        rows = [*rows, PromptRow(600, 1600, "decode-gone", 1, 2, in_step=True, stopped=True)]
    pinned = draw(pins())
    if any(pin.purpose == "lent" for pin in pinned):
        pairs.append(PairRow("prefill-7", 1, 1))
    references = sum(row.num_blocks for row in rows) + sum(pin.num_blocks for pin in pinned)
    owned = references - draw(st.integers(0, references // 2))
    free = draw(st.integers(0, 50))
    ref = WorkerRef(f"prefill-{number}", draw(st.integers(1, 3)), "tcp://127.0.0.1:1")
    return Audited(ref, Books(1, free + owned, free, owned, references, prompts=tuple(rows), pairs=tuple(pairs), pins=pinned))


def leaks(workers: list[Audited]) -> Any:
    return find_leaks(workers, LEASE_S, 2.0)


@given(clusters())
def test_a_sound_cluster_leaks_nothing(workers: list[Audited]) -> None:
    assert leaks(workers) == []


@dataclass(frozen=True)
class Corruption:
    """What is done to a worker of a sound cluster, and the kind and subject of the one finding that must follow."""

    kind: str
    apply: Callable[[Audited, st.DataObject], tuple[Audited, str]]
    role: Role


def change(worker: Audited, **values: Any) -> Audited:
    assert worker.books is not None
    return replace(worker, books=replace(worker.books, **values))


def pick(data: st.DataObject, rows: list[Any]) -> Any:
    assume(rows)
    return data.draw(st.sampled_from(rows))


def swap(rows: tuple[Any, ...], old: Any, *new: Any) -> tuple[Any, ...]:
    return (*(row for row in rows if row is not old), *new)


def silence(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    return replace(worker, books=None), ""


def lose_blocks(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    """The worker notices too; that is one finding, not two."""
    lost = data.draw(st.integers(-5, 5).filter(bool))
    assert worker.books is not None
    return change(worker, total_blocks=worker.books.total_blocks + lost, problems=("a block has leaked",)), ""


def contradict(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    return change(worker, problems=("a block has two owners",)), "a block has two owners"


def forget_claim(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = pick(data, [row for row in worker.books.tickets if row.ticket_id in worker.claims])
    claims = {ticket_id: waits for ticket_id, waits in worker.claims.items() if ticket_id != row.ticket_id}
    return replace(worker, claims=claims), f"ticket {row.ticket_id}"


def lose_stream(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    return replace(worker, claims={**worker.claims, 99: True}), "ticket 99"


def lose_owner(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = pick(data, [row for row in worker.books.tickets if not row.state.final])
    tickets = swap(worker.books.tickets, row, replace(row, owner=Owner.NOBODY))
    return change(worker, tickets=tickets), f"ticket {row.ticket_id}"


def overdue(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = pick(data, [row for row in worker.books.tickets if row.state is not TicketState.ATTACHED])
    tickets = swap(worker.books.tickets, row, replace(row, overdue_s=LEASE_S + data.draw(st.floats(0.1, 100))))
    return change(worker, tickets=tickets), f"ticket {row.ticket_id}"


def wait_for_nobody(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    """As a client that speaks our wire, reserves and only pings."""
    assert worker.books is not None
    row = TicketRow(88, 1088, Owner.OTHER, data.draw(st.sampled_from(WAITING)), 3, 0, False, False, -1.0)
    tickets = (*worker.books.tickets, row)
    references = worker.books.references + 3  # to blocks that it shares with others
    return change(worker, tickets=tickets, references=references), "ticket 88"


def count_references(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    return change(worker, references=worker.books.references + 1, problems=("references differ",)), ""


def other_transfer(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = pick(data, [row for row in worker.books.prompts if not row.stopped])
    prompts = swap(worker.books.prompts, row, replace(row, transfer_id=row.ticket_id))
    return change(worker, prompts=prompts), f"ticket {row.ticket_id} of {row.decode_id} (epoch {row.decode_epoch})"


def for_another_life(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = PromptRow(5, 1005, "decode-0", 99, 0, in_step=False, stopped=False)
    return change(worker, prompts=(*worker.books.prompts, row)), "ticket 5 of decode-0 (epoch 99)"


def leave_behind(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = PromptRow(5, 1005, "decode-gone", 1, 0, in_step=False, stopped=True)
    return change(worker, prompts=(*worker.books.prompts, row)), "ticket 5 of decode-gone (epoch 1)"


def push_for_nobody(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    lends_nothing = tuple(pin for pin in worker.books.pins if pin.purpose != "lent")
    fewer = sum(pin.num_blocks for pin in worker.books.pins) - sum(pin.num_blocks for pin in lends_nothing)
    worker = change(worker, pins=lends_nothing, references=worker.books.references - fewer)
    assert worker.books is not None
    pairs = tuple(pair for pair in worker.books.pairs if pair.decode_id != "prefill-7")
    return change(worker, pairs=(*pairs, PairRow("decode-0", 99, 1))), "pushes to decode-0 (epoch 99)"


def send_to_nobody(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    assert worker.books is not None
    row = SendRow(5, 1005, "decode-0", 99)
    return change(worker, sends=(*worker.books.sends, row)), "ticket 5 of decode-0 (epoch 99)"


def keep_pinned(worker: Audited, data: st.DataObject) -> tuple[Audited, str]:
    """As of a fetch whose worker never learned that it is over."""
    assert worker.books is not None
    row = PinRow("fetched", 2, LEASE_S + data.draw(st.floats(0.1, 100)))
    pins, references = (*worker.books.pins, row), worker.books.references + 2
    return change(worker, pins=pins, references=references), "pins (fetched)"


CORRUPTIONS = [
    Corruption("pin", keep_pinned, Role.PREFILL),
    Corruption("pin", keep_pinned, Role.DECODE),
    Corruption("silent", silence, Role.PREFILL),
    Corruption("silent", silence, Role.DECODE),
    Corruption("blocks", lose_blocks, Role.PREFILL),
    Corruption("blocks", lose_blocks, Role.DECODE),
    Corruption("books", contradict, Role.PREFILL),
    Corruption("books", contradict, Role.DECODE),
    Corruption("claim", forget_claim, Role.DECODE),
    Corruption("stream", lose_stream, Role.DECODE),
    Corruption("owner", lose_owner, Role.DECODE),
    Corruption("overdue", overdue, Role.DECODE),
    Corruption("transfer", wait_for_nobody, Role.DECODE),
    Corruption("references", count_references, Role.PREFILL),
    Corruption("references", count_references, Role.DECODE),
    Corruption("ticket", other_transfer, Role.PREFILL),
    Corruption("ticket", for_another_life, Role.PREFILL),
    Corruption("send", send_to_nobody, Role.DECODE),
    Corruption("prompt", leave_behind, Role.PREFILL),
    Corruption("pushes", push_for_nobody, Role.PREFILL),
]


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=lambda c: f"{c.apply.__name__}-{c.role.value}")
@given(workers=clusters(), data=st.data())
def test_a_single_corruption_is_found_and_nothing_else(
    corruption: Corruption, workers: list[Audited], data: st.DataObject
) -> None:
    index = pick(data, [n for n, worker in enumerate(workers) if worker.ref.worker_id.startswith(corruption.role.value)])
    workers[index], subject = corruption.apply(workers[index], data)
    [leak] = leaks(workers)
    assert leak.key == (corruption.kind, *workers[index].life, subject)
    assert leak.message.startswith(f"{leak.worker_id} (epoch {leak.epoch}): ")


def test_a_prompt_that_vanished_is_missed_by_its_ticket() -> None:
    """Seen from the other side: the worker that should have it says nothing wrong."""
    ticket = TicketRow(7, 1007, Owner.ASKER, TicketState.RECEIVING, 3, 0, False, False, -1.0)
    decode = Audited(WorkerRef("decode-0", 2, ""), Books(1, 10, 7, 3, 3, tickets=(ticket,)), {7: False})
    prefill = Audited(WorkerRef("prefill-0", 1, ""), Books(1, 10, 10, 0, 0))
    [leak] = leaks([decode, prefill])
    assert (leak.kind, leak.num_blocks) == ("transfer", 3)
    sentence = "ticket 7 (3 blocks, receiving) waits for KV that no worker has a prompt or a stream for"
    assert leak.message == f"decode-0 (epoch 2): {sentence}"
    assert [leak.kind for leak in leaks([decode, replace(prefill, books=None)])] == ["silent"], "it may have the prompt"
    hung = Audited(WorkerRef("decode-1", 1, ""), None)
    assert [leak.kind for leak in leaks([decode, prefill, hung])] == ["silent"], "it may have a stream that migrates there"
