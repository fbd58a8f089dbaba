"""What the answers of chats and plain completions share: the fields that every object repeats, and the usage."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from router.dispatch.journal import Guesses
from router.request.answer import Answer, Delta
from telemetry.request_times import RequestTimes

Json = dict[str, Any]
_T = TypeVar("_T")

_LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON can't say."""


@dataclass(frozen=True)
class AnswerInfo:
    """What all JSON objects of one answer repeat, and what the client asked to see in them."""

    answer_id: str
    created: int
    """Unix time at which the answer was begun, in seconds."""
    model: str
    fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    """The token ids of each prompt."""
    choices_per_prompt: int
    logprobs: bool
    return_token_ids: bool
    include_usage: bool
    """Whether a stream's last chunk has the usage."""
    continuous_usage: bool
    """Whether every chunk of a stream has the usage up to it."""
    include_times: bool
    """Whether the usage tells where the time went."""
    include_predictions: bool
    """Whether the usage tells how many tokens were guessed."""

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts together."""
        return len(self.prompts) * self.choices_per_prompt

    @property
    def sparse(self) -> bool:
        """Whether a stream leaves out chunks that say nothing: a character or a stop string that is still open."""
        return not self.return_token_ids and not self.logprobs

    def prompt_of(self, index: int) -> tuple[int, ...]:
        """Return the token ids of the prompt that choice `index` answers. The choices of a prompt follow each other."""
        return self.prompts[index // self.choices_per_prompt]


ENTRY_SIZE = 16
"""A token with its logprob, alternatives too, takes as long to write as so many characters take to encode: about 2 us."""
LARGE_ENTRIES = 256
"""What has more tokens with logprobs is written in a thread and slice by slice."""
LARGE_SIZE = 65_536
"""So is what has more token ids and characters."""


class Offload(Protocol):
    """Runs work in a thread if its size would hold up the loop, as `router.service.Router.offload` does."""

    def __call__(self, size: int, work: Callable[..., _T], *args: Any) -> Awaitable[_T]:
        """Return `work(*args)`; `size` is in characters, bytes or tokens."""
        ...


class AnswerShape(Protocol):
    """One endpoint's way of writing an answer as JSON objects."""

    def opening(self, index: int) -> Json | None:
        """Return the chunk that goes before the first text of a choice; None if the endpoint has none."""
        ...

    def num_prompt_ids(self, opened: range, index: int) -> int:
        """Return the number of prompts' token ids in the openings of these choices and in the next chunk of choice `index`.

        To be called if the client asked for token ids.
        """
        ...

    def chunk(self, delta: Delta) -> Json:
        """Return the chunk of one piece."""
        ...

    def usage_chunk(
        self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None], guesses: Guesses
    ) -> Json:
        """Return a chunk without choices that has the usage of all of them; `times` has one entry for each choice."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the object of an answer that is not streamed, with these choices in order."""
        ...


def usage(
    info: AnswerInfo,
    num_completion_tokens: int,
    cached_tokens: int,
    times: Sequence[RequestTimes | None],
    guesses: Guesses,
) -> Json:
    """Return the usage of an answer, in tokens. A prompt counts once, however many choices it has.

    `cached_tokens` is the number of the prompts' tokens that were cached. If the client asked for it, the usage tells where the
    time of each choice went up to now, and how many tokens were guessed, right and wrong, as OpenAI's does of predictions.
    """
    num_prompt_tokens = sum(map(len, info.prompts))
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if info.include_predictions:
        counts["completion_tokens_details"] = predictions(guesses)
    if not info.include_times:
        return counts
    now = time.monotonic()
    return {**counts, "times": [None if each is None else each.report(now) for each in times]}


def predictions(guesses: Guesses) -> Json:
    """Return how many tokens were guessed, right and wrong, under the names that OpenAI's usage has for predictions."""
    return {"accepted_prediction_tokens": guesses.right, "rejected_prediction_tokens": guesses.drafts - guesses.right}


def whole_usage(info: AnswerInfo, answers: Sequence[Answer]) -> Json:
    """Return the usage of an answer that is not streamed."""
    num_tokens, cached_tokens = sum(len(each.token_ids) for each in answers), sum(each.cached_tokens for each in answers)
    guesses = Guesses.total(each.guesses for each in answers)
    return usage(info, num_tokens, cached_tokens, [each.times for each in answers], guesses)


def clipped(logprob: float | None) -> float | None:
    """Return the logprob as JSON can say it: OpenAI's stand-in for minus infinity. None stays None."""
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
