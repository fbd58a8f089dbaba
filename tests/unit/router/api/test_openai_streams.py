"""Streams that OpenAI's package could not follow: an end in the piece of a call, choices that begin in any order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
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


def chunks_of(deltas: AsyncGenerator[Delta, None], info: AnswerInfo) -> list[Any]:
    """What is sent of an answer."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    answer = EventSender(deltas, CompletionEvents(ChatShape(info), info), at_once, None, 60.0)
    asyncio.run(answer({"type": "http"}, receive, send))
    body = b"".join(message.get("body", b"") for message in sent).decode()
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n") if line.startswith("data: {")]


def followed(chunks: Sequence[Any]) -> tuple[ChatCompletionStreamState[Any], list[str]]:
    """What OpenAI's package has of these chunks, and the types of the events that it makes of them."""
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState(input_tools=omit, response_format=omit)
    return state, [event.type for chunk in chunks for event in state.handle_chunk(ChatCompletionChunk.model_validate(chunk))]


def test_the_end_comes_after_the_call() -> None:
    chunks = chunks_of(one_piece(), INFO)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "tool_calls"]
    assert [choice["delta"] for choice in choices[2:]] == [{}]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == [5, 6]
    _, kinds = followed(chunks)
    assert kinds.count("tool_calls.function.arguments.done") == 1


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_choices_open_in_their_order(order: Sequence[int]) -> None:
    async def choices() -> AsyncGenerator[Delta, None]:
        for index in order:
            yield Delta(index, f"choice {index}", (5,), (), None, 0)
        for index in reversed(order):
            yield Delta(index, "!", (6,), (), "stop", 0)

    state, kinds = followed(chunks_of(choices(), replace(INFO, choices_per_prompt=3)))
    said = [choice.message.content for choice in state.get_final_completion().choices]
    assert said == [f"choice {index}!" for index in range(3)]
    assert kinds.count("content.done") == 3
