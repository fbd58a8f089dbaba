"""Messages between a router and a decode worker, in the order of a stream's life."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.messages.common import Failed
from protocol.messages.load import NOTHING_BROUGHT, Brought
from protocol.messages.workers import Ticket
from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from protocol.share import NOBODYS, Share
from protocol.trace import TraceContext


@message(10)
@dataclass(frozen=True)
class Reserve:
    """Asks a decode worker for blocks: for the prompt and the beginning of the answer. Answered with Reserved or Failed."""

    call_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    """Prompt and, on a resumed stream, the tokens that were already emitted."""
    max_tokens: int
    """Most tokens of the answer. Blocks are taken for its beginning, but a whole that can never fit is refused."""
    cache_salt: str
    """Only requests with the same salt share cached KV; empty is a salt like any other."""
    trace: TraceContext
    """Trace of the request. The worker's log lines about the request carry its id."""
    own_tokens: int
    """Tokens at the prompt's end that must lie in blocks of the ticket's own, even if they are cached.

    0 if KV is sent for the prompt. 1 if it may be computed here, for the logits of its last token. All of them if the logits of
    every token are wanted.
    """
    share: Share = NOBODYS
    """The tenant's right to seats and blocks, beside those of other tenants."""
    displaces: bool = False
    """Whether streams may be preempted to make room for the request."""


@message(11)
@dataclass(frozen=True)
class Reserved:
    """The answer to `Reserve`: the blocks are the request's, under a lease."""

    call_id: int
    ticket: Ticket


@message(12)
@dataclass(frozen=True)
class Attach:
    """Lets a ticket's stream join the decode batch, as soon as its KV is committed. Answered with Attached or Failed."""

    call_id: int
    ticket_id: int
    first_token: int | None
    """Token that prefill sampled; its KV is the first that decode computes. None: nothing is sent, and the prompt is computed
    here."""
    sampling: SamplingParams
    num_generated: int
    """Tokens of the answer so far, the first token included if there is one; there are earlier ones on a resumed stream."""


@message(13)
@dataclass(frozen=True)
class Attached:
    """The answer to `Attach`: the stream is in the batch, or waits for its turn."""

    call_id: int
    waited_s: float
    """Seconds that `Attach` waited for the KV; 0 if it had arrived before."""


@message(14)
@dataclass(frozen=True)
class Release:
    """Gives a ticket back, in any state and for any reason. It has no answer and may be sent twice."""

    ticket_id: int


@dataclass(frozen=True)
class Prefilled:
    """What is told of a prompt with the first token after it, wherever it was computed."""

    prefill_s: float
    """Seconds from the prompt's first chunk to the first token."""
    cached_tokens: int
    """Tokens at the prompt's beginning whose KV was cached or fetched, and so not computed."""
    prompt_logprobs: PromptLogprobs | None
    """Logprobs of the prompt's tokens, if they were asked for and none of the answer was emitted before."""
    brought: Brought = NOTHING_BROUGHT
    """KV of the prompt that was brought from elsewhere before it was computed."""


@dataclass(frozen=True)
class StreamOutput:
    """What one step added to one stream. `error` set means that the stream ends here without a finish reason."""

    ticket_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """Logprobs, one entry for each token; empty if they were not asked for."""
    finish_reason: FinishReason | None
    error: Failed | None
    prefilled: Prefilled | None = None
    """What the router is told about a prompt that was computed here, with its first token."""
    drafts: int = 0
    """Tokens that were guessed for this step. Of `token_ids`, all but the first were guessed right."""


@message(15)
@dataclass(frozen=True)
class TokenFrame:
    """What one step of a decode worker made for one router: an output for each of its streams that the step computed.

    Where these are many, they come in several frames.
    """

    outputs: tuple[StreamOutput, ...]
    step_s: float
    """Seconds that the step took that made these tokens."""


@message(16)
@dataclass(frozen=True)
class Migrate:
    """Hand this attached ticket's stream over to another decode worker, without a token lost or said twice.

    Answered with Failed if that can't be; then the stream goes on where it is, unless it has ended or was released.
    """

    call_id: int
    ticket_id: int
    target: Ticket
    """Ticket at the target for all of the stream's tokens that the router has, but the newest, whose KV is not computed yet.
    Tokens that come meanwhile are added by the transfer."""


@message(17)
@dataclass(frozen=True)
class Migrated:
    """The KV is at the target, committed. All tokens were sent before this; the ticket here is gone."""

    call_id: int
    newest_token: int
    """The stream's newest token, which the router sends to the target with `Attach`."""
    num_generated: int
    """Tokens of the answer so far, that one included."""


@message(18)
@dataclass(frozen=True)
class Copy:
    """Send the KV of this attached ticket's stream to another decode worker as well, as far as the target's tokens go.

    Answered with Failed if that can't be. The stream goes on where it is in any case.
    """

    call_id: int
    ticket_id: int
    target: Ticket
    """Ticket at the target for the stream's first tokens, of which all KV was computed."""


@message(19)
@dataclass(frozen=True)
class Copied:
    """The KV is at the target, committed: it stays in the cache there when the ticket is released."""

    call_id: int
