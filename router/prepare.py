"""From a checked body to what the pipeline needs: token ids, sampling, lengths that fit. Pure; may run in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from configs.facts import ModelFacts
from protocol.errors import ContextLengthError, InvalidRequestError
from protocol.messages import SamplingParams
from router.api.chat import ChatBody, ChatMessage
from router.api.completions import CompletionBody
from router.api.fields import MAX_SEED
from router.fair_queue import ANYBODY, Standing
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """A request in the terms of the pipeline."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    cache_salt: str
    """Only requests with the same salt share cached KV; empty if the client sent none."""
    standing: Standing = ANYBODY
    """Decides about its place in line."""


class Preparer:
    """Knows the model's text side and limits. `max_model_len` is prompt and answer together."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, template: ChatTemplate, max_model_len: int) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len

    def chat(self, body: ChatBody) -> Generation:
        """Raises InvalidRequestError, and ContextLengthError when prompt and answer are too long."""
        return self._generation(body, self.chat_tokens(body.messages), "messages")

    def completion(self, body: CompletionBody) -> Generation:
        """Raises InvalidRequestError, and ContextLengthError when prompt and answer are too long."""
        prompt = body.single_prompt()
        if isinstance(prompt, str):
            token_ids = self.text_tokens(prompt)
        else:
            self.check_tokens(prompt, "prompt")
            token_ids = prompt
        return self._generation(body, token_ids, "prompt")

    def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_bos=add_special_tokens)

    def chat_tokens(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """The messages through the model's own template, which puts in what special tokens it wants."""
        conversation = [message.for_template() for message in messages]
        return self._tokenizer.encode(self._template.render(conversation, add_generation_prompt=add_generation_prompt))

    def text(self, token_ids: Sequence[int]) -> str:
        """What these tokens say. Raises InvalidRequestError for ids outside the vocabulary."""
        self.check_tokens(token_ids, "tokens")
        return self._tokenizer.decode(token_ids, skip_special=False)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequestError for ids outside the vocabulary."""
        outside = [token_id for token_id in token_ids if not 0 <= token_id < self._facts.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"`{param}` must hold token ids from 0 to {self._facts.vocab_size - 1}; got {outside[0]}", param=param
            )

    def _generation(self, body: ChatBody | CompletionBody, token_ids: Sequence[int], param: str) -> Generation:
        body.check_together()
        self.check_tokens(body.stop_token_ids, "stop_token_ids")
        if not token_ids:
            raise InvalidRequestError(f"`{param}` must not be empty", param=param)
        max_tokens = self._answer_room(len(token_ids), body.answer_tokens, param)
        if body.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` must be an integer from 0 to max_tokens ({max_tokens}); got {body.min_tokens}",
                param="min_tokens",
            )
        own_stops = () if body.ignore_eos else self._facts.eos_token_ids
        sampling = SamplingParams(
            seed=secrets.randbelow(MAX_SEED) if body.seed is None else body.seed,
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k >= self._facts.vocab_size else max(0, body.top_k),
            min_p=body.min_p,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*own_stops, *body.stop_token_ids))),
            num_logprobs=body.num_logprobs,
        )
        return Generation(tuple(token_ids), sampling, body.stops(), body.cache_salt or "")

    def _answer_room(self, num_prompt_tokens: int, wanted: int | None, param: str) -> int:
        """How long the answer may get: what the client wants, or all that the context has left."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"the model's context is {self._max_model_len} tokens, but `{param}` alone has {num_prompt_tokens}, which "
                "leaves no room for an answer",
                param=param,
            )
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"the model's context is {self._max_model_len} tokens, but `{param}` has {num_prompt_tokens} and max_tokens is "
                f"{wanted}: {num_prompt_tokens + wanted} together; shorten one of them",
                param=param,
            )
        return room if wanted is None else wanted
