"""An answer whose call and end came in one piece, because its client or the router was slow: the end has a chunk of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from openai import omit
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from router.api.answer_sender import EventSender
from router.api.chat.shape import ChatShape
from router.api.completion_events import CompletionEvents
from router.api.shapes import AnswerInfo
from router.request.answer import Delta
from router.text.tool_calls import ToolCallDelta

INFO = AnswerInfo(
    "chatcmpl-1",
    1,
    "m",
    "fp",
    ((1, 2),),
    1,
    logprobs=False,
    return_token_ids=True,
    include_usage=False,
    continuous_usage=False,
    include_times=False,
    include_predictions=False,
)


async def one_piece() -> AsyncGenerator[Delta, None]:
    calls = (ToolCallDelta(0, "call_1", "f", ""), ToolCallDelta(0, None, None, "{}"))
    yield Delta(0, "", (5, 6), (), "tool_calls", 0, calls)


async def at_once(size: int, work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def test_the_end_comes_after_the_call() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    answer = EventSender(one_piece(), CompletionEvents(ChatShape(INFO), INFO), at_once, None, 60.0)
    asyncio.run(answer({"type": "http"}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent).decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in body.split("\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "tool_calls"]
    assert [choice["delta"] for choice in choices[2:]] == [{}]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == [5, 6]
    state = ChatCompletionStreamState(input_tools=omit, response_format=omit)
    kinds = [event.type for chunk in chunks for event in state.handle_chunk(ChatCompletionChunk.model_validate(chunk))]
    assert kinds.count("tool_calls.function.arguments.done") == 1
