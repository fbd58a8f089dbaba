"""POST /v1/completions: its body and the shapes of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Neutral, Together, either, given
from router.api.fields import MAX_LOGPROBS, NOT_YET, TRUE, SamplingBody
from router.api.shapes import AnswerInfo, Json, clipped, usage, whole_usage
from router.request.answer import Answer, Delta, TextLogprobs
from telemetry.request_times import RequestTimes

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024
_PROMPT = f"a non-empty string, a non-empty list of token ids, or a list of up to {_MAX_PROMPTS} of either"


_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[int], Field(min_length=1)]
_Prompt = TypeVar("_Prompt")
_Several = Annotated[list[_Prompt], Field(min_length=1, max_length=_MAX_PROMPTS)]


class CompletionBody(SamplingBody):
    neutral: ClassVar[Neutral] = NOT_YET | {
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    together: ClassVar[Together] = (
        *SamplingBody.together,
        either({"properties": {"max_tokens": {"anyOf": [{"type": "null"}, {"minimum": 1}]}}}, given(TRUE, "echo")),
    )

    prompt: _Text | _TokenIds | _Several[_Text] | _Several[_TokenIds] = Field(description=_PROMPT)
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="an integer of at least 1, or 0 with echo"
    )
    echo: bool = Field(default=False, description="true or false")
    best_of: int | None = Field(default=None, ge=1, description="an integer equal to n")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def answer_tokens(self) -> int:
        """How many tokens the client wants at most; OpenAI's default if it doesn't say."""
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """All prompts, in order. Raises InvalidRequestError if there are too many."""
        prompts: list[str | list[int]] = []
        if isinstance(self.prompt, str):
            prompts = [self.prompt]
        else:
            for part in self.prompt:
                if not isinstance(part, int):
                    prompts.append(part)
            prompts = prompts or [[part for part in self.prompt if isinstance(part, int)]]
        if len(prompts) * self.n > _MAX_PROMPTS:
            raise InvalidRequestError(
                f"`prompt` must be {_PROMPT}, n times as many choices included; got {len(prompts)} with n {self.n}",
                param="prompt",
            )
        return prompts

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("`max_tokens` must be an integer of at least 1 without `echo`; got 0", param="max_tokens")
        if self.best_of not in (None, self.n):
            raise InvalidRequestError(f"`best_of` is not supported yet unless it equals `n` ({self.n})", param="best_of")


class CompletionShape:
    """Turns what the router produced into OpenAI's text completion objects; one object per answer."""

    def __init__(self, info: AnswerInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """How far the text of each choice goes."""
        self._head: Json = {
            "id": info.answer_id,
            "object": "text_completion",
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
        }

    def opening(self, index: int) -> None:
        return None

    def chunk(self, delta: Delta) -> Json:
        choice = self._choice(delta.index, delta)
        if self._info.return_token_ids and delta.index not in self._begun:
            choice["prompt_token_ids"] = self._info.prompt_of(delta.index)
        self._begun.add(delta.index)
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._info.include_usage else chunk

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None]) -> Json:
        return {**self._head, "choices": [], "usage": usage(self._info, num_completion_tokens, cached_tokens, times)}

    def whole(self, answers: Sequence[Answer]) -> Json:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        if self._info.return_token_ids:
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = self._info.prompt_of(index)
        return {**self._head, "choices": choices, "usage": whole_usage(self._info, answers)}

    def _choice(self, index: int, piece: Delta | Answer) -> Json:
        choice: Json = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}
        if self._info.logprobs:
            choice["logprobs"] = self._logprobs(index, piece.logprobs)
        if self._info.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, index: int, entries: Sequence[TextLogprobs]) -> Json:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry.chosen.token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [clipped(entry.chosen.logprob) for entry in entries],
            "tokens": [entry.chosen.token.text for entry in entries],
            "top_logprobs": [_likeliest(entry) for entry in entries],
        }


def _likeliest(entry: TextLogprobs) -> dict[str, float | None] | None:
    """By text, the chosen token included. Tokens with the same text (parts of a character) share the likeliest one's entry.

    A prompt's first token has none.
    """
    if entry.chosen.logprob is None:
        return None
    likeliest: dict[str, float | None] = {}
    for option in (*entry.top, entry.chosen):
        likeliest.setdefault(option.token.text, clipped(option.logprob))
    return likeliest
