"""What is known of one request of a load test. Times are in seconds; those that begin with `at_` count from the run's start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """planned ──client is late──► dispatched ──max-concurrency──► sent ──► first token ──► ... ──► end"""

    index: int
    prompt_len: int
    """Length of the prompt as the dataset wanted it; `prompt_tokens` is what the server counted."""
    output_len: int
    """The longest answer that was asked for."""
    at_planned: float
    at_dispatched: float = 0.0
    """When this client got around to the request."""
    at_sent: float = 0.0
    """When it was the request's turn. Connecting, if that is needed, comes after."""
    ttft: float | None = None
    """Seconds from `at_sent` to the first token; None if there was none."""
    itl: list[float] = field(default_factory=list)
    """Gaps between pieces of the answer, whatever number of tokens each of them has: vLLM's definition."""
    e2el: float = 0.0
    """Seconds from `at_sent` to the last piece of the answer, or to the failure."""
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt that the server did not compute again; None if its usage does not tell."""
    finish_reason: str | None = None
    error: str | None = None
    """Why the request failed; None if it did not."""
    server_times: Mapping[str, float] | None = None
    """Where the time went, in seconds by stage, if the server told."""

    @property
    def input_tokens(self) -> int:
        """Length of the prompt as the server counted it, or as the dataset wanted it if the server did not tell."""
        return self.prompt_len if self.prompt_tokens is None else self.prompt_tokens

    @property
    def ok(self) -> bool:
        """Whether the request has an answer that came to its end."""
        return self.error is None and self.ttft is not None

    @property
    def lateness(self) -> float:
        """Seconds by which this client dispatched the request too late, by its own fault."""
        return self.at_dispatched - self.at_planned

    @property
    def client_wait(self) -> float:
        """Seconds from the planned time to sending: lateness, and the wait for other requests to end (`max-concurrency`)."""
        return self.at_sent - self.at_planned

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        if self.ttft is None or self.completion_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.completion_tokens - 1)

    @property
    def ttst(self) -> float | None:
        """Seconds from `at_sent` to the second piece of the answer."""
        return self.ttft + self.itl[0] if self.ttft is not None and self.itl else None


@dataclass
class TurnRecord(RequestRecord):
    """One question of a conversation. The first is planned before the run, each other one when the last answer is there."""

    conversation_id: int = 0
    """Number of the planned conversation, from 0."""
    turn_index: int = 0
    """Number of the question in its conversation, from 0."""
    reusable_tokens: int | None = None
    """Tokens of the prompt that an earlier request of the run began with, as far as can be told; known after the run."""
