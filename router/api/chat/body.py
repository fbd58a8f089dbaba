"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Neutral, Together, absent, either, given
from router.api.chat.messages import MESSAGES, ChatMessage, check_messages
from router.api.fields import MAX_LOGPROBS, NOT_YET, TRUE, Count, SamplingBody
from router.api.structured import MAX_TOOLS, ToolBody, ToolChoice


class ChatBody(SamplingBody):
    """The body of a chat: messages, tools, and the fields that it shares with a plain completion."""

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
        """Number of alternatives that each token of the answer is shown with; None if no logprobs are wanted."""
        return self.top_logprobs if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that the client wants in the answer; None leaves it to the room that there is."""
        return self.max_completion_tokens or self.max_tokens

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        super().check_together()
        check_messages(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` needs `logprobs` set to true", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "`max_tokens` is the old name of `max_completion_tokens`; give only one of them", param="max_tokens"
            )
