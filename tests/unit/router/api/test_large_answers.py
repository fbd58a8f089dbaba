"""Answers with many logprobs: the same bytes as in one go, and the loop goes on while they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.api.answer_sender import EventSender
from router.api.chat.shape import ChatShape
from router.api.completion_events import CompletionEvents, whole_completion
from router.api.completions.shape import CompletionShape
from router.api.large.encoding import Entries, encode, encoded, encoded_slices
from router.api.responses.body import ResponsesBody
from router.api.responses.builder import ResponseBuilder
from router.api.responses.events import ResponseEvents, whole_response
from router.api.server_sent_events import event
from router.api.shapes import AnswerInfo, Offload
from router.request.answer import Delta, TextLogprob, TextLogprobs, TokenText
from router.text.threads import TextThreads
from tests.unit.router.api.test_http_large_bodies import watched_loop

_T = TypeVar("_T")

NUM_TOKENS, NUM_TOP = 10_000, 20
NUM_STREAMED = 1000
INFO = AnswerInfo(
    answer_id="a",
    created=1,
    model="m",
    fingerprint="f",
    prompts=((1, 2),),
    choices_per_prompt=1,
    logprobs=True,
    return_token_ids=True,
    include_usage=False,
    continuous_usage=False,
    include_times=False,
    include_predictions=False,
)
TOKEN = TokenText("w\u00e4\u2028", (119, 195, 164))
ENTRY = TextLogprobs(TextLogprob(TOKEN, -0.5), tuple(TextLogprob(TOKEN, -1.0 - index) for index in range(NUM_TOP)))
BODY = ResponsesBody(model="m", input="x", include=["message.output_text.logprobs"], top_logprobs=NUM_TOP)

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=200).map(Entries)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


@given(json_values)
def test_slices_are_the_same_json(value: Any) -> None:
    assert encoded(value, large=True) == encode(value).encode() == encoded(value, large=False)
    assert event({"value": value}, large=True) == event({"value": value})


def test_a_long_text_goes_by_slices() -> None:
    text = 'w\u00e4\u2028\U0001f600"\\\n\x01 ' * 50_000
    slices = list(encoded_slices({"prompt": text, "short": "a"}))
    assert "".join(slices) == encode({"prompt": text, "short": "a"})
    assert max(map(len, slices)) < len(text)


async def pieces(num_tokens: int = NUM_TOKENS) -> AsyncGenerator[Delta, None]:
    for index in range(num_tokens):
        yield Delta(0, TOKEN.text, (index,), (ENTRY,), "length" if index == num_tokens - 1 else None, 0)
        if index % 50 == 0:
            await asyncio.sleep(0)


def test_slices_of_the_objects_themselves() -> None:
    delta = Delta(0, TOKEN.text, (1,) * 300, (ENTRY,) * 300, "stop", 0)
    for shape in (ChatShape(INFO), CompletionShape(INFO)):
        chunk = shape.chunk(replace(delta))
        assert encoded(chunk, large=True) == encode(chunk).encode()
    assert isinstance(ChatShape(INFO).opening(0)["prompt_token_ids"], Entries)
    assert isinstance(CompletionShape(INFO).chunk(delta)["choices"][0]["prompt_token_ids"], Entries)


def offload_of(threads: TextThreads) -> Offload:
    async def offload(size: int, work: Callable[..., _T], *args: Any) -> _T:
        return await threads.offload("acme", size, work, *args)

    return offload


async def whole(threads: TextThreads, kind: str) -> bytes:
    if kind == "response":
        return await whole_response(ResponseBuilder("a", "m", BODY, 2), offload_of(threads), pieces())
    shape = ChatShape(INFO) if kind == "chat" else CompletionShape(INFO)
    return await whole_completion(shape, INFO, offload_of(threads), pieces())


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_a_whole_answer_with_many_logprobs_is_written_beside_the_loop(kind: str) -> None:
    async def test() -> None:
        threads = TextThreads()
        async with watched_loop() as pauses:
            data = await whole(threads, kind)
        threads.close()
        assert data.count(b'"logprob') + data.count(b"-0.5") >= NUM_TOKENS
        json.loads(data)
        assert pauses[0] < 0.15

    asyncio.run(test())


def test_the_last_events_of_a_response_are_written_beside_the_loop() -> None:
    async def test() -> None:
        threads, events = TextThreads(), ResponseEvents(ResponseBuilder("a", "m", BODY, 2))
        async with watched_loop() as pauses:
            async for delta in pieces(NUM_STREAMED):
                last = await threads.offload("acme", events.size(delta), events.push, delta)
        threads.close()
        assert events.ended
        assert last.count(b'"bytes"') == 4 * NUM_STREAMED * (1 + NUM_TOP) + 1 + NUM_TOP
        assert pauses[0] < 0.15

    asyncio.run(test())


def test_prompts_that_are_repeated_with_each_choice_hold_up_nobody() -> None:
    prompt, choices = tuple(range(20_000)), 128
    info = replace(INFO, prompts=(prompt,) * 2, choices_per_prompt=choices, logprobs=False)

    async def main() -> None:
        threads = TextThreads()
        async with watched_loop() as pauses:
            body = await whole_completion(CompletionShape(info), info, offload_of(threads), one_token_each(2 * choices))
        threads.close()
        assert pauses[0] < 0.15
        written = json.loads(body)["choices"]
        assert len(written) == 2 * choices
        assert all(choice["prompt_token_ids"] == list(prompt) for choice in written)

    asyncio.run(main())


def test_texts_of_prompts_that_are_repeated_with_each_choice_hold_up_nobody() -> None:
    """A small body, of which nothing was counted as work: its answer had no tokens."""
    text, choices = "abcd " * 6000, 1024
    info = replace(INFO, prompts=((1,),) * 8, choices_per_prompt=128, logprobs=False, return_token_ids=False)

    async def echoes() -> AsyncGenerator[Delta, None]:
        for index in range(choices):
            yield Delta(index, text, (), (), "length", 0)

    async def main() -> None:
        threads = TextThreads()
        async with watched_loop() as pauses:
            await asyncio.sleep(0.002)  # it watches from now on
            body = await whole_completion(CompletionShape(info), info, offload_of(threads), echoes())
            await asyncio.sleep(0.002)
        threads.close()
        assert pauses[0] < 0.1
        assert [choice["text"] for choice in json.loads(body)["choices"]] == [text] * choices

    asyncio.run(main())


async def one_token_each(choices: int) -> AsyncGenerator[Delta, None]:
    for index in range(choices):
        yield Delta(index, "a", (1,), (), "length", 0)


@pytest.mark.parametrize("shape_of", [ChatShape, CompletionShape])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_ids_of_prompts_count_as_work_to_stream(shape_of: type[ChatShape] | type[CompletionShape], wanted: bool) -> None:
    """The choices of a chat open together: 32 copies of a prompt of 128k ids were encoded on the loop in one call."""
    prompt = tuple(range(70_000))
    info = replace(INFO, prompts=(prompt,), choices_per_prompt=3, logprobs=False, return_token_ids=wanted)
    events, given = CompletionEvents(shape_of(info), info), []

    async def noted(size: int, work: Callable[..., _T], *args: Any) -> _T:
        given.append(size)
        return work(*args)

    async def deltas() -> AsyncGenerator[Delta, None]:
        for index in (2, 2, 1, 0, 0):
            yield Delta(index, "a", (1,), (), None, 0)
        for index in range(3):
            yield Delta(index, "", (), (), "length", 0)

    async def reading() -> Message:
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never

    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(EventSender(deltas(), events, noted, None, 60.0)({"type": "http"}, reading, send))
    shown = b"".join(sent).count(b"69999]")
    assert shown == (3 if wanted else 0)
    once = [len(prompt)] * 3 if shape_of is CompletionShape else [3 * len(prompt)]
    assert given == (once if wanted else [])
