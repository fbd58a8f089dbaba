"""What the answers of both completion endpoints share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.request.answer import Answer, Delta
from telemetry.request_times import RequestTimes

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
    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    choices_per_prompt: int
    logprobs: bool
    return_token_ids: bool
    include_usage: bool
    """In a stream: whether a last chunk has the usage."""
    continuous_usage: bool
    """In a stream: whether every chunk has the usage up to it."""
    include_times: bool
    """Whether the usage tells where the time went."""

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts together."""
        return len(self.prompts) * self.choices_per_prompt

    @property
    def sparse(self) -> bool:
        """Whether a stream leaves out chunks that say nothing: a character or a stop string that is still open."""
        return not self.return_token_ids and not self.logprobs

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """What choice `index` answers: those of a prompt follow each other."""
        return self.prompts[index // self.choices_per_prompt]


class AnswerShape(Protocol):
    """One endpoint's way of writing an answer as JSON objects."""

    def opening(self, index: int) -> Json | None:
        """A chunk that goes before the first text of a choice, if the endpoint has one."""
        ...

    def chunk(self, delta: Delta) -> Json: ...

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None]) -> Json:
        """`times`: one for each choice."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Json: ...


def usage(info: AnswerInfo, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None]) -> Json:
    """A prompt counts once however many choices it has. `cached_tokens`: how many of the prompts' tokens were cached.

    Where the time of each choice went up to now is told if it was asked for.
    """
    num_prompt_tokens = sum(map(len, info.prompts))
    counts = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if not info.include_times:
        return counts
    now = time.monotonic()
    return {**counts, "times": [None if each is None else each.report(now) for each in times]}


def whole_usage(info: AnswerInfo, answers: Sequence[Answer]) -> Json:
    """Of an answer that was not streamed."""
    num_tokens, cached_tokens = sum(len(each.token_ids) for each in answers), sum(each.cached_tokens for each in answers)
    return usage(info, num_tokens, cached_tokens, [each.times for each in answers])


def clipped(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
