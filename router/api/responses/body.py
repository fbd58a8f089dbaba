"""The body of POST /v1/responses, and the chat that it stands for.

A response is a chat in other words: `as_chat` translates, the chat's way through the router is used, and `Translation.undone`
names the fields as the client knows them in whatever is refused there. Nothing is stored: each request brings the whole
conversation, as items.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body, ListOf, Neutral, Together
from router.api.chat.messages import MAX_MESSAGES
from router.api.fields import MAX_LOGPROBS, MAX_SALT_CHARS, MAX_SEED, METADATA, STREAM_OPTIONS, Count, Metadata
from router.api.responses.input import CallItem, Item, MessageItem
from router.api.responses.options import FunctionTool, ReasoningOptions, ResponseToolChoice, TextOptions
from router.api.responses.translation import Translation
from router.api.shapes import Json
from router.api.structured import MAX_TOOLS

LOGPROBS: Final = "message.output_text.logprobs"

_SOME = Field(min_length=1)
_ITEMS = Field(min_length=1, max_length=MAX_MESSAGES)


class ResponseStreamOptions(Body):
    """Options of a streamed response, none of which changes anything here."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}


class ResponsesBody(Body):
    """The body of a request for a response. `as_chat` translates it."""

    neutral: ClassVar[Neutral] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    together: ClassVar[Together] = (STREAM_OPTIONS,)

    model: str = Field(min_length=1, description="the name of the served model (see /v1/models)")
    input: Annotated[str, _SOME] | Annotated[ListOf[Item], _ITEMS] = Field(
        description=f"a non-empty string or a non-empty list of up to {MAX_MESSAGES} items"
    )
    instructions: str | None = Field(default=None, description="a string")
    max_output_tokens: Count | None = Field(default=None, description="an integer of at least 1")
    temperature: float = Field(default=1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(default=1.0, gt=0, le=1, description="a number over 0, up to 1")
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default=[], max_length=16, description=f"a list of what answers shall have besides; this model knows {LOGPROBS}"
    )
    text: TextOptions = Field(default=TextOptions(), description="an object with format")
    tools: ListOf[FunctionTool] = Field(default=[], max_length=MAX_TOOLS, description=f"a list of up to {MAX_TOOLS} functions")
    tool_choice: ResponseToolChoice = Field(
        default="auto", description='one of none, auto, required, or {"type": "function", "name": ...}'
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")
    truncation: Literal["auto", "disabled"] = Field(default="disabled", description="auto or disabled")
    reasoning: ReasoningOptions = Field(default=ReasoningOptions(), description="an object with effort")
    metadata: Metadata = Field(default={}, description=METADATA)
    stream: bool = Field(default=False, description="true or false")
    stream_options: ResponseStreamOptions | None = Field(default=None, description="an object")
    speculative_decoding: bool = Field(
        default=True, description="true or false; whether tokens may be guessed, where the cluster does so"
    )
    include_predictions: bool = Field(
        default=False, description="true or false; puts into the usage how many tokens were guessed, right and wrong"
    )
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="an integer from 0 to 2**63 - 1")
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description=f"a non-empty string of up to {MAX_SALT_CHARS} characters",
    )
    prompt_cache_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description=f"a non-empty string of up to {MAX_SALT_CHARS} characters",
    )
    priority: int = Field(default=0, ge=-20, le=20, description="an integer from -20 to 20; lower goes first")
    user: str | None = Field(default=None, description="a string")
    safety_identifier: str | None = Field(default=None, description="a string")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response's text has the logprobs of its tokens."""
        return LOGPROBS in self.include

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError(f"`top_logprobs` needs {LOGPROBS} in `include`", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is for streamed answers; set `stream` to true", param="stream_options")


def as_chat(body: ResponsesBody) -> Translation:
    """Translate the body into a chat's. Raises InvalidRequestError for fields that don't go together."""
    body.check_together()
    translation = Translation()
    values = translation.values
    for name in (
        "model",
        "temperature",
        "top_p",
        "top_logprobs",
        "truncation",
        "stream",
        "speculative_decoding",
        "seed",
        "cache_salt",
        "prompt_cache_key",
        "priority",
    ):
        values[name] = getattr(body, name)
    values["logprobs"] = body.wants_logprobs
    values["max_completion_tokens"] = body.max_output_tokens
    translation.names |= {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
    values["reasoning_effort"] = body.reasoning.effort
    translation.names["reasoning_effort"] = "reasoning.effort"
    values["response_format"] = body.text.format.response_format()
    translation.names |= {"response_format": "text.format", "response_format.json_schema": "text.format"}
    values["tools"] = [tool.as_chat() for tool in body.tools]
    values["parallel_tool_calls"] = body.parallel_tool_calls
    translation.names |= {f"tools.{index}.function": f"tools.{index}" for index in range(len(body.tools))}
    values["tool_choice"] = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.as_chat()
    values["messages"] = _messages(body, translation.names)
    return translation


def _messages(body: ResponsesBody, names: dict[str, str]) -> list[Json]:
    """The conversation; notes in `names` where what of a message was in the body."""
    names["messages"] = "input"
    messages: list[Json] = []
    if body.instructions is not None:
        names["messages.0"] = "instructions"
        messages.append({"role": "developer", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        if isinstance(item, CallItem):
            # What an answer said and what it called were one message of the model's, and are one in its next prompt.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
                names[f"messages.{len(messages) - 1}"] = f"input.{index}"
            calls = messages[-1].setdefault("tool_calls", [])
            names[f"messages.{len(messages) - 1}.tool_calls.{len(calls)}.function"] = f"input.{index}"
            calls.append(item.tool_call())
        else:
            names[f"messages.{len(messages)}"] = f"input.{index}"
            if not isinstance(item, MessageItem):
                names[f"messages.{len(messages)}.tool_call_id"] = f"input.{index}.call_id"
            messages.append(item.message())
    return messages
