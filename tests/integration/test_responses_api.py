"""`/v1/responses` with the `openai` package through the whole cluster: HAProxy, Serve, router, workers; traces on the way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

ASK: Any = {"model": "smollm2", "input": "Name the capital of France.", "temperature": 0}
TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "tracestate": "rojo=1", "x-request-id": "mine"}


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Capital(BaseModel):
    city: str
    in_europe: bool


def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_whole_and_streamed_responses_are_the_chats_answer(cluster: Any) -> None:
    api = client(cluster)
    whole = api.responses.create(**ASK)
    assert "Paris" in whole.output_text
    chat = api.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": ASK["input"]}], temperature=0)
    assert chat.choices[0].message.content == whole.output_text
    events = list(api.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3, "it came in pieces"
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage is not None
    assert whole.usage is not None
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.slow
def test_the_async_client_holds_a_conversation(cluster: Any) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as api:
            async with api.responses.stream(**ASK, instructions="Answer in one sentence.") as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                first = await stream.get_final_response()
            assert "".join(deltas) == first.output_text
            items: list[Any] = [{"role": "user", "content": ASK["input"]}, *first.output]
            items.append({"role": "user", "content": "And of Italy?"})
            second = await api.responses.create(**ASK | {"input": items}, max_output_tokens=8)
            assert second.status in ("completed", "incomplete")

    asyncio.run(talk())


@pytest.mark.slow
def test_answers_parse_into_models(cluster: Any) -> None:
    parsed = client(cluster).responses.parse(**ASK, text_format=Capital, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Capital)
    with client(cluster).responses.stream(**ASK, text_format=Capital, max_output_tokens=200) as stream:
        assert stream.until_done().get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.slow
def test_a_function_is_called_and_its_result_read(cluster: Any) -> None:
    api = client(cluster)
    question: Any = {"role": "user", "content": "What is the weather in Kiel?"}
    with api.responses.stream(**ASK | {"input": [question]}, tools=[WEATHER], tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    call = first.output[0]
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees and rain"}
    second = api.responses.create(
        **ASK | {"input": [question, *first.output, result]}, tools=[WEATHER], tool_choice="none", max_output_tokens=30
    )
    assert second.output_text


def test_refusals_name_the_field(cluster: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client(cluster).responses.create(**ASK, store=True)
    assert refused.value.param == "store"
    with pytest.raises(openai.BadRequestError) as refused:
        client(cluster).responses.create(**ASK, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_a_client_that_goes_away_frees_its_work(cluster: Any) -> None:
    stream = client(cluster).responses.create(**ASK | {"input": "Write a very long story."}, stream=True)
    next(iter(stream))
    stream.close()
    cluster.until(cluster.clean, 10)


def test_traces_and_request_ids_come_through_every_proxy(cluster: Any) -> None:
    for path, body, status in (("/v1/responses", ASK, 200), ("/v1/responses", {}, 400), ("/v1/nothing", {}, 404)):
        answer = httpx.post(f"{cluster.url}{path}", json=body, headers=SENT, timeout=60)
        assert answer.status_code == status
        [parent] = answer.headers.get_list("traceparent")
        assert parent.startswith(f"00-{TRACE}-")
        assert parent != SENT["traceparent"]
        assert answer.headers["tracestate"] == "rojo=1"
        assert answer.headers.get_list("x-request-id") == ["mine"]
    made = httpx.get(f"{cluster.url}/health", headers={"traceparent": "00-zz"}, timeout=60)
    assert len(made.headers["traceparent"]) == 55
    assert len(made.headers.get_list("x-request-id")) == 1
