"""Messages between a router and a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.messages.decode import Prefilled
from protocol.messages.workers import Ticket, WorkerRef
from protocol.sampling import FinishReason, SamplingParams, TokenLogprobs
from protocol.trace import TraceContext


@dataclass(frozen=True)
class FetchFrom:
    """Another worker that probably holds more of a prompt's beginning than the one that computes it, and can give it."""

    worker: WorkerRef
    num_tokens: int
    """Tokens at the prompt's beginning that the other worker probably holds, in whole blocks."""


@message(20)
@dataclass(frozen=True)
class Prefill:
    """Has a prefill worker compute a prompt and push its KV to the ticket. Answered with FirstToken or Failed."""

    call_id: int
    request_id: str
    ticket: Ticket
    token_ids: tuple[int, ...]
    """Prompt and, on a resumed stream, the tokens that were already emitted."""
    num_generated: int
    """How many at the end of `token_ids` were emitted before; 0 for a fresh request."""
    sampling: SamplingParams
    cache_salt: str
    """Keeps cached prefixes of different tenants apart; the same as in the prompt's `Reserve`."""
    trace: TraceContext
    ahead: bool
    """Whether the prompt goes before those that are there. Between two that do, the others get a step."""
    fetch: FetchFrom | None = None
    """Blocks to fetch before the prompt is computed. What can't be had is computed."""


@message(21)
@dataclass(frozen=True)
class FirstToken:
    """Sent as soon as it is sampled. With a finish reason nothing is handed over and the ticket must be released."""

    call_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prefilled: Prefilled


@message(22)
@dataclass(frozen=True)
class Cancel:
    """Gives up a prompt at a prefill worker, in any state. It has no answer and may be sent twice."""

    request_id: str
