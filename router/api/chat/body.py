"""POST /v1/chat/completions: its body and the shapes of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Neutral, Together, absent, either, given
from router.api.chat.messages import MESSAGES, ChatMessage, check_messages
from router.api.fields import MAX_LOGPROBS, NOT_YET, TRUE, Count, SamplingBody
from router.api.shapes import AnswerInfo, Json, clipped, usage, whole_usage
from router.api.structured import MAX_TOOLS, ToolBody, ToolChoice
from router.request.answer import Answer, Delta, TextLogprob, TextLogprobs
from router.text.tool_calls import ToolCallDelta, whole_calls
from telemetry.request_times import RequestTimes


class ChatBody(SamplingBody):
    neutral: ClassVar[Neutral] = NOT_YET | {
        "functions": ([],),
        "function_call": ("none", "auto"),
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
    }

    together: ClassVar[Together] = (
        *SamplingBody.together,
        either({"properties": {"top_logprobs": {"enum": [0, None]}}}, given(TRUE, "logprobs")),
        either(absent("max_tokens"), absent("max_completion_tokens")),  # equal ones are accepted, which a schema can't say
        either(
            {"properties": {"tool_choice": {"enum": ["none", "auto", None]}}}, given({"type": "array", "minItems": 1}, "tools")
        ),
    )

    messages: list[ChatMessage] = Field(min_length=1, description=MESSAGES)
    max_completion_tokens: Count | None = Field(default=None, description="an integer of at least 1")
    truncation: Literal["auto", "disabled"] = Field(default="disabled", description="auto or disabled")
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    tools: list[ToolBody] = Field(default=[], max_length=MAX_TOOLS, description=f"a list of up to {MAX_TOOLS} functions")
    tool_choice: ToolChoice | None = Field(
        default=None, description='one of none, auto, required, or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        """How many tokens the client wants at most; None leaves it to the room that there is."""
        return self.max_completion_tokens or self.max_tokens

    def check_together(self) -> None:
        super().check_together()
        check_messages(self.messages)
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
        said: Json = {"content": delta.text} if delta.text or not (delta.finish_reason or delta.tool_calls) else {}
        if delta.tool_calls:
            said["tool_calls"] = [_call_piece(piece) for piece in delta.tool_calls]
        choice: Json = {
            "index": delta.index,
            "delta": said,
            "logprobs": self._logprobs(delta.logprobs) if self._info.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._info.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice)

    def usage_chunk(self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None]) -> Json:
        return {**self._chunk_head, "choices": [], "usage": usage(self._info, num_completion_tokens, cached_tokens, times)}

    def whole(self, answers: Sequence[Answer]) -> Json:
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": whole_usage(self._info, answers),
        }
        return {**body, "prompt_token_ids": self._info.prompt_of(0)} if self._info.return_token_ids else body

    def _choice(self, index: int, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.tool_calls:
            calls = [_call(call_id, name, arguments) for call_id, name, arguments in whole_calls(answer.tool_calls)]
            message |= {"content": answer.text or None, "tool_calls": calls}
        choice: Json = {
            "index": index,
            "message": message,
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


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_piece(piece: ToolCallDelta) -> Json:
    if piece.call_id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    assert piece.name is not None, "a call begins with its name"
    return {"index": piece.index, **_call(piece.call_id, piece.name, piece.arguments)}
