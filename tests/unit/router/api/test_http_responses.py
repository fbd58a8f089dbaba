"""POST /v1/responses over real HTTP: objects, the order of events, the `openai` package, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from protocol.errors import KvTransferError

Run = Callable[..., None]

TEXT = "Paris is the capital of France. Ünïcödé, 日本語 and 🧑‍🚀 too."
ASK = {"model": "smollm2", "input": "What is the capital of France?"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

AROUND_TEXT = (
    ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"],
    ["response.output_text.done", "response.content_part.done", "response.output_item.done"],
)


def events(body: str) -> list[Any]:
    """All server-sent events, each checked: its name, its number, and its fields by the types of the `openai` package."""
    parsed = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        EVENT.validate_python(fields)
        parsed.append(fields)
    assert [each["sequence_number"] for each in parsed] == list(range(len(parsed)))
    return parsed


async def streamed(cluster: Any, **fields: Any) -> list[Any]:
    response = await cluster.http.post("/v1/responses", json=ASK | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def client(cluster: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def prompt_text(cluster: Any) -> str:
    """What the workers were asked last."""
    text: str = cluster.tokenizer.decode(cluster.prefill[0].seen[-1].token_ids, skip_special=False)
    return text


def test_a_whole_response(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "temperature": 0.5, "top_p": 0.9}
        answer = await cluster.http.post("/v1/responses", json=ASK | fields)
        body = answer.json()
        response = Response.model_validate(body)
        assert (response.status, response.output_text, response.object) == ("completed", TEXT, "response")
        assert (response.instructions, response.metadata, response.user) == ("Be brief.", {"a": "b"}, "u")
        assert (body["store"], response.error, response.incomplete_details) == (False, None, None)
        sent = cluster.prefill[0].seen[0]
        assert (sent.sampling.temperature, sent.sampling.top_p) == (0.5, 0.9)
        num_answer = len(cluster.tokenizer.encode(TEXT)) + 1
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (len(sent.token_ids), num_answer)
        assert response.usage.total_tokens == len(sent.token_ids) + num_answer
        system, user = "<|im_start|>system\nBe brief.<|im_end|>\n", f"<|im_start|>user\n{ASK['input']}<|im_end|>\n"
        assert prompt_text(cluster) == f"{system}{user}<|im_start|>assistant\n"
        await cluster.clean()

    run_cluster(test)


def test_events_have_their_names_order_and_numbers(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.001
        seen = await streamed(cluster)
        names = [each["type"] for each in seen]
        deltas = [each["delta"] for each in seen if each["type"] == "response.output_text.delta"]
        before, after = AROUND_TEXT
        assert names == [*before, *["response.output_text.delta"] * len(deltas), *after, "response.completed"]
        assert len(deltas) > 5
        assert "".join(deltas) == TEXT
        begun, ended = seen[0]["response"], seen[-1]["response"]
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
        assert ended["output"] == [seen[-2]["item"]]
        assert seen[-2]["item"]["content"] == [seen[-3]["part"]]
        assert seen[-4]["text"] == seen[-3]["part"]["text"] == TEXT
        assert {each["item_id"] for each in seen if "item_id" in each} == {seen[-2]["item"]["id"]}
        whole = (await cluster.http.post("/v1/responses", json=ASK)).json()
        of_one_answer = {"id", "created_at", "completed_at", "output"}
        assert {k: v for k, v in whole.items() if k not in of_one_answer} == {
            k: v for k, v in ended.items() if k not in of_one_answer
        }

    run_cluster(test)


def test_an_answer_that_is_cut_off_is_incomplete(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        seen = await streamed(cluster, max_output_tokens=3)
        last = seen[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"][0]["status"] == last["response"]["status"] == "incomplete"
        assert last["response"]["usage"]["output_tokens"] == 3
        whole = (await cluster.http.post("/v1/responses", json=ASK | {"max_output_tokens": 3})).json()
        assert whole["output"][0]["content"] == last["response"]["output"][0]["content"]
        assert (whole["status"], whole["max_output_tokens"]) == ("incomplete", 3)

    run_cluster(test)


def test_an_empty_answer_is_a_message_without_text(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("")
        seen = await streamed(cluster)
        before, after = AROUND_TEXT
        assert [each["type"] for each in seen] == [*before, *after, "response.completed"]
        assert seen[-1]["response"]["output"][0]["content"][0]["text"] == ""

    run_cluster(test)


def test_an_error_on_the_way_is_a_failed_response(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].error_after = 0
        seen = await streamed(cluster)
        last = seen[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        [item] = last["response"]["output"]
        assert item["status"] == "incomplete"
        deltas = [each["delta"] for each in seen if each["type"] == "response.output_text.delta"]
        assert item["content"][0]["text"] == "".join(deltas)
        cluster.prefill[0].fail_with = KvTransferError("before the first token")
        early = await cluster.http.post("/v1/responses", json=ASK | {"stream": True})
        assert early.status_code == 503

    run_cluster(test)


def test_items_are_a_conversation(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("It is Paris.")
        async with client(cluster) as api:
            first = await api.responses.create(model="smollm2", input="Where?")
            items: list[Any] = [
                {"role": "user", "content": "Where?"},
                *(item.model_dump() for item in first.output),
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure"}]},
            ]
            await api.responses.create(model="smollm2", instructions="Short.", input=items)
        turns = ("system\nShort.", "user\nWhere?", "assistant\nIt is Paris.", "user\nSure")
        said = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
        assert prompt_text(cluster) == f"{said}<|im_start|>assistant\n"

    run_cluster(test)


def test_the_openai_package_streams(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        async with client(cluster) as api:
            async with api.responses.stream(model="smollm2", input="?", instructions="!") as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text == TEXT
            plain = await api.responses.create(model="smollm2", input="?", stream=True)
            last = [event async for event in plain][-1]
            assert last.type == "response.completed"
            assert last.response.output_text == TEXT

    run_cluster(test)


def test_logprobs(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two")
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
        whole = Response.model_validate((await cluster.http.post("/v1/responses", json=ASK | fields)).json())
        part: Any = whole.output[0].content[0]  # type: ignore[union-attr, index]
        assert "".join(entry.token for entry in part.logprobs) == part.text == "one two"
        assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2]
        seen = await streamed(cluster, **fields)
        deltas = [each for each in seen if each["type"] == "response.output_text.delta"]
        [done] = [each for each in seen if each["type"] == "response.output_text.done"]
        assert [entry for each in deltas for entry in each["logprobs"]] == done["logprobs"]
        assert [entry["token"] for entry in done["logprobs"]] == ["one", " two"]
        [added] = [each for each in seen if each["type"] == "response.content_part.added"]
        assert added["part"]["logprobs"] == [], "events are of their moment"

    run_cluster(test)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "`reasoning.effort` is not used by this model's chat template"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "one of none, minimal"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
        ({"mood": 1}, "mood", "unknown field"),
        ({"messages": []}, "messages", "unknown field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]},
            "input.0.content.0.y",
            "unknown",
        ),
        ({"input": ""}, "input", "a non-empty string or"),
        ({"input": []}, "input", "a non-empty string or"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "got 'robot'"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "got 'computer_call'"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
            "input.1.type",
            "and the item itself, as clients send it with `store` false: nothing is stored here; got 'item_reference'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]},
            "input.0.content.0.type",
            "only kinds of content that this model reads; got 'input_image'",
        ),
        ({"input": "a b " * 5000}, "input", "context is 8192 tokens, but `input`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1; got 0"),
        ({"max_output_tokens": 9000}, "input", "and max_output_tokens is 9000"),
        ({"include": ["file_search_call.results"]}, "include", "got 'file_search_call.results'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs in `include`"),
        ({"metadata": {"a": 1}}, "metadata", "up to 16 strings"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "up to 16 strings"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"stream_options": {}}, "stream_options", "set `stream`"),
        ({"model": "gpt-5"}, "model", "this cluster serves"),
    ],
)
def test_bad_input_names_the_field(run_cluster: Run, fields: dict[str, Any], param: str, message: str) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post("/v1/responses", json=ASK | fields)
        assert response.status_code == (404 if param == "model" else 400)
        error = response.json()["error"]
        assert error["param"] == param
        assert message in error["message"]
        assert "messages" not in error["message"] or param == "messages"
        assert not cluster.prefill[0].seen

    run_cluster(test)


def test_a_client_that_leaves_frees_its_work(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 2000)
        cluster.script.step_s = 0.01
        async with cluster.http.stream("POST", "/v1/responses", json=ASK | {"stream": True}) as response:
            await anext(response.aiter_lines())
        await cluster.clean()

    run_cluster(test)
