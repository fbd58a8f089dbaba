"""POST /v1/completions: its body and the shapes of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.answer import Answer, Delta, TextLogprobs
from router.api.body import Neutral
from router.api.fields import MAX_LOGPROBS, NOT_YET, SamplingBody
from router.api.shapes import AnswerInfo, Json, clipped, usage

_DEFAULT_MAX_TOKENS = 16
_PROMPT = "a non-empty string, a non-empty list of token ids, or a list with exactly one of either"


class CompletionBody(SamplingBody):
    neutral: ClassVar[Neutral] = NOT_YET | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "response_format": ({"type": "text"},),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    prompt: str | list[int] | list[str] | list[list[int]] = Field(description=_PROMPT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def answer_tokens(self) -> int:
        """How many tokens the client wants at most; OpenAI's default if it doesn't say."""
        return self.max_tokens or _DEFAULT_MAX_TOKENS

    def single_prompt(self) -> str | list[int]:
        """The one prompt. Raises InvalidRequestError if there is none, it is empty, or there are several."""
        prompt: str | Sequence[int | str | list[int]] = self.prompt
        if not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise InvalidRequestError(f"`prompt` must be {_PROMPT}; got {len(prompt)} prompts", param="prompt")
            prompt = prompt[0]
        if not prompt:
            raise InvalidRequestError(f"`prompt` must be {_PROMPT}; got an empty one", param="prompt")
        return prompt if isinstance(prompt, str) else [token_id for token_id in prompt if isinstance(token_id, int)]


class CompletionShape:
    """Turns what the router produced into OpenAI's text completion objects; one object per answer."""

    def __init__(self, info: AnswerInfo) -> None:
        self._info = info
        self._num_chunks = 0
        self._offset = 0
        self._head: Json = {
            "id": info.answer_id,
            "object": "text_completion",
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
        }

    def opening(self) -> None:
        return None

    def chunk(self, delta: Delta) -> Json:
        choice = self._choice(delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
        if self._info.return_token_ids and self._num_chunks == 0:
            choice["prompt_token_ids"] = self._info.prompt_token_ids
        self._num_chunks += 1
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._info.include_usage else chunk

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int) -> Json:
        num_prompt_tokens = len(self._info.prompt_token_ids)
        return {**self._head, "choices": [], "usage": usage(num_prompt_tokens, num_completion_tokens, cached_tokens)}

    def whole(self, answer: Answer) -> Json:
        choice = self._choice(answer.text, answer.token_ids, answer.logprobs, answer.finish_reason)
        if self._info.return_token_ids:
            choice["prompt_token_ids"] = self._info.prompt_token_ids
        numbers = usage(len(self._info.prompt_token_ids), len(answer.token_ids), answer.cached_tokens)
        return {**self._head, "choices": [choice], "usage": numbers}

    def _choice(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TextLogprobs], finish_reason: str | None) -> Json:
        choice: Json = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._info.logprobs:
            choice["logprobs"] = self._logprobs(logprobs)
        if self._info.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def _logprobs(self, entries: Sequence[TextLogprobs]) -> Json:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.chosen.token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [clipped(entry.chosen.logprob) for entry in entries],
            "tokens": [entry.chosen.token.text for entry in entries],
            "top_logprobs": [_likeliest(entry) for entry in entries],
        }


def _likeliest(entry: TextLogprobs) -> dict[str, float]:
    """By text, the chosen token included. Tokens with the same text (parts of a character) share the likeliest one's entry."""
    likeliest: dict[str, float] = {}
    for option in (*entry.top, entry.chosen):
        likeliest.setdefault(option.token.text, clipped(option.logprob))
    return likeliest
