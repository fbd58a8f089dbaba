"""The items of a response's input: messages, calls of functions, and what these gave. An earlier response's output fits."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from router.api.body import Body, ListOf, Neutral, told_apart
from router.api.chat.messages import CACHE_MARK, MAX_PARTS
from router.api.shapes import Json

_TYPES = "one of message, function_call, function_call_output"
_WHOLE = "and the item itself, as clients send it with `store` false: nothing is stored here"
_TEXT = f'a string or a list of up to {MAX_PARTS} {{"type": "input_text", "text": ...}} parts'

_Status = Literal["in_progress", "completed", "incomplete"]
_STATUS = "one of in_progress, completed, incomplete"
_CALL_ID = "a non-empty string"


class InputText(Body):
    """One part of an item's content, which is text."""

    neutral: ClassVar[Neutral] = {"annotations": ([],), **CACHE_MARK}

    type: Literal["input_text", "output_text"] = Field(
        description='"input_text" or "output_text", the only kinds of content that this model reads'
    )
    text: str = Field(description="a string")
    logprobs: list[Any] | None = Field(default=None, description="a list, as an answer had it; a prompt has no use for it")
    parsed: Any = Field(default=None, description="what the openai package made of the text, which says the same")


class MessageItem(Body):
    """A message of the conversation."""

    neutral: ClassVar[Neutral] = {"phase": ()}

    type: Literal["message"] = Field(default="message", description=_TYPES)
    role: Literal["system", "developer", "user", "assistant"] = Field(description="one of system, developer, user, assistant")
    content: str | Annotated[ListOf[InputText], Field(max_length=MAX_PARTS)] = Field(
        description=f'{_TEXT} ("output_text" in answers)'
    )
    id: str | None = Field(default=None, description="a string")
    status: _Status | None = Field(default=None, description=_STATUS)

    def message(self) -> Json:
        """Return the item as a message of a chat."""
        return {"role": self.role, "content": _content(self.content)}


class CallItem(Body):
    """A call of a function that the model made earlier."""

    neutral: ClassVar[Neutral] = {"async": (False,), "async_": (), "caller": (), "namespace": ()}

    type: Literal["function_call"] = Field(description=_TYPES)
    call_id: str = Field(min_length=1, description=_CALL_ID)
    name: str = Field(description="a string")
    arguments: str = Field(description="a JSON object, as a string")
    parsed_arguments: Any = Field(default=None, description="what the openai package made of the arguments")
    id: str | None = Field(default=None, description="a string")
    status: _Status | None = Field(default=None, description=_STATUS)

    def tool_call(self) -> Json:
        """Return the item as one of the `tool_calls` of a chat's message."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallOutputItem(Body):
    """An input item with the result of a function that the model called."""

    neutral: ClassVar[Neutral] = {"caller": (), "name": (), "namespace": ()}

    type: Literal["function_call_output"] = Field(description=_TYPES)
    call_id: str = Field(min_length=1, description=_CALL_ID)
    output: str | Annotated[ListOf[InputText], Field(max_length=MAX_PARTS)] = Field(description=_TEXT)
    id: str | None = Field(default=None, description="a string")
    status: _Status | None = Field(default=None, description=_STATUS)

    def message(self) -> Json:
        """Return the item as a message of a chat, of the role tool."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _content(self.output)}


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    told_apart(lambda given: given or "message", f"{_TYPES}, {_WHOLE}"),
]


def _content(content: str | list[InputText]) -> str | list[Json]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
