"""The JSON objects that chats, completions and responses answer with, for the OpenAPI document alone.

The answers are made as plain JSON in `router/api/chat/shape.py`, `router/api/completions/shape.py` and
`router/api/responses/builder.py`. That they are as described here is checked by schemathesis, an independent client
(`tests/unit/router/api/test_http_schemathesis.py`). A field that is `NotRequired` is there only if the request asks for it.
The docstrings are part of the document: clients read them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from router.api.fields import Effort
from router.api.responses.options import FunctionTool, ResponseToolChoice, TextOptions
from router.request.answer import Finish

exact = with_config(ConfigDict(extra="forbid"))
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


@exact
class PromptTokensDetails(TypedDict):
    cached_tokens: Count


@exact
class CompletionTokensDetails(TypedDict):
    """Tokens that were guessed: those that are part of the answer, and the others."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


@exact
class Times(TypedDict):
    """Where the time of a choice went, in seconds."""

    stages: dict[str, Seconds]
    total: Seconds
    ttft: Seconds | None
    token_gaps: list[Seconds]
    resumes: Count
    placed_by: str | None


@exact
class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    times: NotRequired[list[Times | None]]


@exact
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


@exact
class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@exact
class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


@exact
class CalledFunction(TypedDict):
    name: str
    arguments: str


@exact
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@exact
class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


@exact
class ChatChoice(TypedDict):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[Count]]


@exact
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[Count]]


@exact
class CalledFunctionPiece(TypedDict):
    name: NotRequired[str]
    arguments: str


@exact
class ToolCallPiece(TypedDict):
    """The first piece of a call has everything, the others have more of its arguments."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionPiece


@exact
class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallPiece]


@exact
class ChatChunkChoice(TypedDict):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[Count]]


@exact
class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[Count]]


@exact
class CompletionLogprobs(TypedDict):
    text_offset: list[Count]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


@exact
class CompletionChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[Count]]
    prompt_token_ids: NotRequired[list[Count]]


@exact
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


@exact
class CompletionChunkChoice(TypedDict):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[Count]]
    prompt_token_ids: NotRequired[list[Count]]


@exact
class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


@exact
class OutputText(TypedDict):
    type: Literal["output_text"]
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChosenLogprob]
    text: str


@exact
class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


@exact
class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


@exact
class InputTokensDetails(TypedDict):
    cached_tokens: Count
    cache_write_tokens: Count


@exact
class OutputTokensDetails(TypedDict):
    """Tokens of reasoning, which there are none of, and of guesses, where the request asks for them."""

    reasoning_tokens: Count
    accepted_prediction_tokens: NotRequired[Count]
    rejected_prediction_tokens: NotRequired[Count]


@exact
class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


@exact
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@exact
class Reasoning(TypedDict):
    effort: Effort | None
    summary: None


@exact
class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    completed_at: Count | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextOptions
    tool_choice: ResponseToolChoice
    tools: list[FunctionTool]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage
    user: str | None


class ResponseEvent(TypedDict):
    """What else an event has depends on its type."""

    type: Annotated[str, Field(pattern=r"^response\.")]
    sequence_number: Count


@exact
class Problem(TypedDict):
    message: str
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


@exact
class Refusal(TypedDict):
    """An error in OpenAI's shape; `param` names the field that is to blame."""

    error: Problem
