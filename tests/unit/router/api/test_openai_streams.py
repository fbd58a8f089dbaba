"""Streams that clients could not follow: an end in the piece of a call, choices in any order, two entries for one call."""

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

from protocol.sampling import FinishReason, SamplingParams
from router.api.answer_sender import EventSender
from router.api.chat.shape import ChatShape
from router.api.completion_events import CompletionEvents
from router.api.shapes import AnswerInfo
from router.dispatch.journal import Tokens
from router.request.answer import AnswerText, Delta, TokenTexts
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallDelta
from router.text.tool_format import tool_format

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
    assert_one_entry_for_each_call(chunks)
    _, kinds = followed(chunks)
    assert kinds.count("tool_calls.function.arguments.done") == 1


def assert_one_entry_for_each_call(chunks: Sequence[Any]) -> None:
    """Older versions of OpenAI's package keep the first list of calls as it is, with two entries where it has two."""
    for chunk in chunks:
        indices = [call["index"] for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert len(set(indices)) == len(indices)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_client_that_reads_one_entry_of_each_chunk_has_the_whole_call(tokenizer: Tokenizer, size: int) -> None:
    """The token ` {"` ends a call's name and begins its arguments."""
    said = tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    assert ' {"' in [tokenizer.decode([each]) for each in said]
    form = replace(tool_format(None), names=("weather",))
    text = AnswerText(0, tokenizer.detokenizer(), TokenTexts(tokenizer), SamplingParams(0, 100), (), None, form)
    shape = ChatShape(INFO)
    chunks = []
    for at in range(0, len(said), size):
        finish = FinishReason.STOP if at + size >= len(said) else None
        chunks.append(shape.chunk(text.push(Tokens(tuple(said[at : at + size]), (), finish))))
    assert_one_entry_for_each_call(chunks)
    entries = [
        chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["choices"][0]["delta"]
    ]
    assert [entry["function"]["name"] for entry in entries if "id" in entry] == ["weather"]
    assert "".join(entry["function"]["arguments"] for entry in entries) == '{"city": "Oslo"}'


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
