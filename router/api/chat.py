"""POST /v1/chat/completions: its body and the shapes of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.answer import Answer, Delta, TextLogprob, TextLogprobs
from router.api.body import Body, Neutral
from router.api.fields import MAX_LOGPROBS, NOT_YET, Count, SamplingBody
from router.api.shapes import AnswerInfo, Json, clipped, usage, whole_usage

_ROLES = "one of system, developer, user, assistant"


class TextPart(Body):
    type: Literal["text"] = Field(description='"text", the only kind of content that this model reads')
    text: str = Field(description="a string")


class ChatMessage(Body):
    neutral: ClassVar[Neutral] = {
        "tool_calls": ([],),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
        "reasoning": (),
    }

    role: Literal["system", "developer", "user", "assistant"] = Field(description=_ROLES)
    content: str | list[TextPart] = Field(description='a string or a list of {"type": "text", "text": ...} parts')
    name: str | None = Field(default=None, description="a string")

    def for_template(self) -> dict[str, str]:
        """As chat templates know messages: content in one piece, and `developer` is what used to be called `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(SamplingBody):
    neutral: ClassVar[Neutral] = NOT_YET | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "documents": ([],),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "truncation": ("disabled",),
    }

    messages: list[ChatMessage] = Field(min_length=1, description="a non-empty list of messages with role and content")
    max_completion_tokens: Count | None = Field(default=None, description="an integer of at least 1")
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        """How many tokens the client wants at most; None leaves it to the room that there is."""
        return self.max_completion_tokens or self.max_tokens

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` needs `logprobs` set to true", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "`max_tokens` is the old name of `max_completion_tokens`; give only one of them", param="max_tokens"
            )


class ChatShape:
    """Turns what the router produced into OpenAI's chat objects; one object per answer."""

    def __init__(self, info: AnswerInfo) -> None:
        self._info = info
        self._chunk_head = self._head("chat.completion.chunk")

    def opening(self, index: int) -> Json:
        """A choice's first chunk: the role and, in vLLM's way, the prompt's tokens if asked for."""
        chunk = self._chunk(
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        )
        return {**chunk, "prompt_token_ids": self._info.prompt_of(index)} if self._info.return_token_ids else chunk

    def chunk(self, delta: Delta) -> Json:
        choice: Json = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            "logprobs": self._logprobs(delta.logprobs) if self._info.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._info.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice)

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int) -> Json:
        return {**self._chunk_head, "choices": [], "usage": usage(self._info, num_completion_tokens, cached_tokens)}

    def whole(self, answers: Sequence[Answer]) -> Json:
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": whole_usage(self._info, answers),
        }
        return {**body, "prompt_token_ids": self._info.prompt_of(0)} if self._info.return_token_ids else body

    def _choice(self, index: int, answer: Answer) -> Json:
        choice: Json = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs) if self._info.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return {**choice, "token_ids": answer.token_ids} if self._info.return_token_ids else choice

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._chunk_head, "choices": [choice]}
        return {**chunk, "usage": None} if self._info.include_usage else chunk

    def _head(self, kind: str) -> Json:
        info = self._info
        return {
            "id": info.answer_id,
            "object": kind,
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
        }

    def _logprobs(self, entries: Iterable[TextLogprobs]) -> Json:
        content = [{**_entry(entry.chosen), "top_logprobs": [_entry(option) for option in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


def _entry(option: TextLogprob) -> Json:
    return {"token": option.token.text, "logprob": clipped(option.logprob), "bytes": option.token.utf8}
