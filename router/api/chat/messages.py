"""The messages of a chat: their fields, which of them go together, and how chat templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body, ListOf, Neutral, Together, absent, either, given
from router.api.structured import ToolCallBody

MAX_MESSAGES = 4096
MESSAGES = f"a non-empty list of messages with role and content, at most {MAX_MESSAGES}"
MAX_PARTS = 1024
"""Parts of one message's content."""

_ROLES = "one of system, developer, user, assistant, tool"
_CONTENT = f'a string or a list of up to {MAX_PARTS} {{"type": "text", "text": ...}} parts'


CACHE_MARK: Neutral = {"prompt_cache_breakpoint": ({"mode": "explicit"},)}
"""OpenAI's mark of where a prefix ends that others share. Prefixes are found without it."""


class TextPart(Body):
    """One part of a message's content, which is text."""

    neutral: ClassVar[Neutral] = CACHE_MARK

    type: Literal["text"] = Field(description='"text", the only kind of content that this model reads')
    text: str = Field(description="a string")


class ChatMessage(Body):
    """One message of a chat."""

    neutral: ClassVar[Neutral] = {
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
        "reasoning": (),
        "type": ("text", "message"),
    }

    together: ClassVar[Together] = (
        either(given({"type": ["string", "array"]}, "content"), given({"type": "array", "minItems": 1}, "tool_calls")),
        either(given({"enum": ["assistant"]}, "role"), {"properties": {"tool_calls": {"maxItems": 0}}}),
        either(
            given({"enum": ["system", "developer", "user", "assistant"]}, "role"), given({"type": "string"}, "tool_call_id")
        ),
        either(given({"enum": ["tool"]}, "role"), absent("tool_call_id")),
    )

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description=_ROLES)
    content: str | Annotated[ListOf[TextPart], Field(max_length=MAX_PARTS)] | None = Field(default=None, description=_CONTENT)
    name: str | None = Field(default=None, description="a string")
    tool_calls: ListOf[ToolCallBody] = Field(default=[], max_length=128, description="a list of up to 128 calls of tools")
    tool_call_id: str | None = Field(default=None, description="the id of an earlier call")
    parsed: Any = Field(default=None, description="what the openai package made of the content, which says the same")
    provider_specific_fields: Any = Field(default=None, description="what LiteLLM notes about an answer, which no prompt shows")

    @property
    def num_chars(self) -> int:
        """Characters of the message's text and of its calls' arguments."""
        said = self.content or ""
        num_said = len(said) if isinstance(said, str) else sum(len(part.text) for part in said)
        return num_said + sum(len(call.function.arguments) for call in self.tool_calls)

    def for_template(self, param: str) -> dict[str, Any]:
        """Return the message as chat templates know it: content in one piece, and the role `system` in place of `developer`.

        Raises InvalidRequestError, which blames a field within `param`, for calls whose arguments are no JSON object.
        """
        parts = self.content if isinstance(self.content, list) else []
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.for_template(f"{param}.tool_calls.{index}") for index, call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def check_together(self, param: str, called: set[str]) -> None:
        """Raise InvalidRequestError for fields that don't go together.

        `param` is the message's path in the body. `called` has the ids of all earlier calls, and gets those of this message.
        """
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError(f"`{param}.content` is missing; it must be {_CONTENT}", param=f"{param}.content")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError(f"`{param}.tool_calls` is for the role assistant", param=f"{param}.tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            problem = "is for the role tool" if self.role != "tool" else "is missing; it must be the id of an earlier call"
            raise InvalidRequestError(f"`{param}.tool_call_id` {problem}", param=f"{param}.tool_call_id")
        if self.tool_call_id is not None and self.tool_call_id not in called:
            problem = f"must be the id of an earlier call; got {self.tool_call_id!r:.80}"
            raise InvalidRequestError(f"`{param}.tool_call_id` {problem}", param=f"{param}.tool_call_id")
        called.update(call.id for call in self.tool_calls)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequestError for messages that don't go together."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        message.check_together(f"messages.{index}", called)
