"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import ListOf, Neutral, Together, absent, either, given
from router.api.chat.messages import MAX_MESSAGES, MESSAGES, ChatMessage, check_messages
from router.api.chat.template import TemplateBody
from router.api.fields import EFFORT, MAX_LOGPROBS, METADATA, NOT_YET, TRUE, Count, Effort, Metadata, SamplingBody
from router.api.structured import MAX_TOOLS, ToolBody, ToolChoice


class ChatBody(SamplingBody, TemplateBody):
    """The body of a chat: messages, tools, and the fields that it shares with a plain completion."""

    neutral: ClassVar[Neutral] = NOT_YET | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "add_special_tokens": (False,),
        "echo": (False,),
        "documents": ([],),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "include_reasoning": (True,),
    }

    together: ClassVar[Together] = (
        *SamplingBody.together,
        either({"properties": {"top_logprobs": {"enum": [0, None]}}}, given(TRUE, "logprobs")),
        either(absent("max_tokens"), absent("max_completion_tokens")),  # equal ones are accepted, which a schema can't say
        either(
            {"properties": {"tool_choice": {"enum": ["none", "auto", None]}}}, given({"type": "array", "minItems": 1}, "tools")
        ),
    )

    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, description=MESSAGES)
    max_completion_tokens: Count | None = Field(default=None, description="an integer of at least 1")
    truncation: Literal["auto", "disabled"] = Field(default="disabled", description="auto or disabled")
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    tools: ListOf[ToolBody] = Field(default=[], max_length=MAX_TOOLS, description=f"a list of up to {MAX_TOOLS} functions")
    tool_choice: ToolChoice | None = Field(
        default=None, description='one of none, auto, required, or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")
    reasoning_effort: Effort | None = Field(default=None, description=EFFORT)
    metadata: Metadata = Field(default={}, description=METADATA)

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives that each token of the answer is shown with; None if no logprobs are wanted."""
        return self.top_logprobs if self.logprobs else None

    @property
    def has_schema(self) -> bool:
        """Whether the answer has a form, which takes longer to check than its bytes say."""
        return super().has_schema or bool(self.tools)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that the client wants in the answer; None leaves it to the room that there is."""
        return self.max_completion_tokens or self.max_tokens

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return what the client gives to the chat template, by name: the field that it comes from, and its value."""
        variables = super().template_variables()
        if self.reasoning_effort is not None:
            if "reasoning_effort" in variables:
                problem = "`reasoning_effort` and `chat_template_kwargs.reasoning_effort` are the same; give only one of them"
                raise InvalidRequestError(problem, param="reasoning_effort")
            variables["reasoning_effort"] = ("reasoning_effort", self.reasoning_effort)
        return variables

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        super().check_together()
        check_messages(self.messages)
        self.check_continuation(self.messages)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` needs `logprobs` set to true", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "`max_tokens` is the old name of `max_completion_tokens`; give only one of them", param="max_tokens"
            )
