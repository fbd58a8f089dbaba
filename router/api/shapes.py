"""What the answers of both completion endpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from router.answer import Answer, Delta

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON can't say."""


@dataclass(frozen=True)
class AnswerInfo:
    """What every object of one answer repeats, and what the client asked to see."""

    answer_id: str
    created: int
    """Unix time, s."""
    model: str
    fingerprint: str
    prompt_token_ids: tuple[int, ...]
    logprobs: bool
    return_token_ids: bool
    include_usage: bool


class AnswerShape(Protocol):
    """One endpoint's way of writing an answer as JSON objects."""

    def opening(self) -> Json | None:
        """A chunk that goes before the first text, if the endpoint has one."""
        ...

    def chunk(self, delta: Delta) -> Json: ...

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int) -> Json: ...

    def whole(self, answer: Answer) -> Json: ...


def usage(num_prompt_tokens: int, num_completion_tokens: int, cached_tokens: int) -> Json:
    """`cached_tokens`: how many of the prompt's tokens were cached."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def clipped(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
