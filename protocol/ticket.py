"""The life of a ticket: one request's claim on KV blocks of one decode worker.

        ┌────────── the prompt is computed here ─────────┐
        ├──── nothing to send ────┐                      │
        │                         ▼                      ▼
    RESERVED ──► RECEIVING ──► COMMITTED ────────────► ATTACHED ──► RELEASED
        │            │             │                      │
        └────────────┴─────────────┴──────────────────────┴──► ABORTED | EXPIRED

    RESERVED    decode holds blocks for the prompt and some of the answer; no KV was sent     (router: Reserve)
    RECEIVING   a prefill worker announced a push; its transfer writes into the blocks        (prefill: PushAnnounce)
    COMMITTED   every token of every layer is there and the commit record was checked         (prefill: PushCommit)
    ATTACHED    the sequence is in the decode batch, or preempted and waiting to go on        (router: Attach)
    RELEASED    the router gave it back, or the sequence finished: blocks free
    ABORTED     cancelled, or its peer died: blocks free once no transfer writes into them
    EXPIRED     its lease ran out; otherwise like ABORTED

A ticket whose prompt is cached at decode as a whole goes from RESERVED to COMMITTED: nothing has to be sent for it. One whose
prompt the decode worker computes itself goes from RESERVED to ATTACHED: there is no transfer to commit.

Blocks return to the free list only in a final state *and* with no transfer in flight (quarantine).
"""

from __future__ import annotations

from enum import Enum


class TicketState(Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ATTACHED = "attached"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({TicketState.RELEASED, TicketState.ABORTED, TicketState.EXPIRED})
_FAILED = frozenset({TicketState.ABORTED, TicketState.EXPIRED})

_NEXT: dict[TicketState, frozenset[TicketState]] = {
    TicketState.RESERVED: frozenset({TicketState.RECEIVING, TicketState.COMMITTED, TicketState.ATTACHED, TicketState.RELEASED})
    | _FAILED,
    TicketState.RECEIVING: frozenset({TicketState.COMMITTED}) | _FAILED,
    TicketState.COMMITTED: frozenset({TicketState.ATTACHED, TicketState.RELEASED}) | _FAILED,
    TicketState.ATTACHED: frozenset({TicketState.RELEASED}) | _FAILED,
    TicketState.RELEASED: frozenset(),
    TicketState.ABORTED: frozenset(),
    TicketState.EXPIRED: frozenset(),
}


def check_transition(old: TicketState, new: TicketState) -> None:
    """Raise AssertionError if a ticket may not go from `old` to `new`: such a move is a bug of ours, not bad input."""
    assert new in _NEXT[old], f"a ticket can't go from {old.name} to {new.name}"


def reserved_tokens(num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """How many tokens a fresh ticket has slots for: the prompt and a block's worth of the answer, so that no stream wants a
    further block right when it starts. The last token of an answer is never fed back, so needs no slot.
    """
    return num_prompt_tokens + min(max_tokens, block_size) - 1
