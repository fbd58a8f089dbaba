"""Calls of functions and formats through /v1/responses: items, events, what workers are asked, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

Run = Callable[..., None]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("weather", "tides")]
ASK: dict[str, Any] = {"model": "smollm2", "input": "Weather in Kiel?", "tools": TOOLS}
CALLS = (
    'I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "tides", "arguments": {"city": "Kiel"}}\n</tool_call>'
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class City(BaseModel):
    name: str
    country: str


def client(cluster: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def prompt_text(cluster: Any) -> str:
    """What the workers were asked last."""
    text: str = cluster.tokenizer.decode(cluster.prefill[0].seen[-1].token_ids, skip_special=False)
    return text


def test_calls_are_items_after_the_message(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        body = (await cluster.http.post("/v1/responses", json=ASK)).json()
        message, *calls = body["output"]
        assert message["content"][0]["text"] == "I look it up."
        assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("function_call", "weather", {"city": "Kiel"}),
            ("function_call", "tides", {"city": "Kiel"}),
        ]
        assert len({call["call_id"] for call in calls} | {item["id"] for item in body["output"]}) == 5
        assert {item["status"] for item in body["output"]} == {body["status"]} == {"completed"}
        assert [tool["name"] for tool in body["tools"]] == ["weather", "tides"]
        assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", True)
        assert "weather" in prompt_text(cluster)

    run_cluster(test)


def test_events_of_calls(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        cluster.script.step_s = 0.001
        answer = await cluster.http.post("/v1/responses", json=ASK | {"stream": True})
        seen = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")]
        for each in seen:
            EVENT.validate_python(each)
        assert [each["sequence_number"] for each in seen] == list(range(len(seen)))
        names = [each["type"].removeprefix("response.") for each in seen]
        compact = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
        of_call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
        assert compact == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", *of_call, "output_item.added", *of_call, "completed"),
        ]
        assert sum(name == "function_call_arguments.delta" for name in names) > 8, "arguments come as they are made"
        places = [each["output_index"] for each in seen if "output_index" in each]
        assert places == sorted(places)
        assert set(places) == {0, 1, 2}

    run_cluster(test)


def test_the_openai_package_goes_round_with_a_function(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        async with client(cluster) as api:
            async with api.responses.stream(**ASK) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert kinds.count("response.function_call_arguments.done") == 2
            calls: list[Any] = [item for item in final.output if item.type == "function_call"]
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id, "output": f"result {number}"}
                for number, call in enumerate(calls)
            ]
            cluster.says("Sunny.")
            asked: list[Any] = [{"role": "user", "content": ASK["input"]}, *final.output, *outputs]
            second = await api.responses.create(**ASK | {"input": asked})
        assert second.output_text == "Sunny."
        text = prompt_text(cluster)
        [turn, *_] = text.partition("<|im_start|>assistant\n")[2].split("<|im_end|>")
        assert turn.startswith("I look it up.")
        assert turn.count("<tool_call>") == 2, "text and calls of an answer are one turn again"
        assert turn.endswith(CALLS.partition("\n")[2])
        assert text.index("result 0") < text.index("result 1")

    run_cluster(test)


def test_parsing_into_a_model(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says('{"name": "Kiel", "country": "Germany"}')
        async with client(cluster) as api:
            parsed = await api.responses.parse(model="smollm2", input="Which?", text_format=City)
            assert parsed.output_parsed == City(name="Kiel", country="Germany")
            async with api.responses.stream(model="smollm2", input="Which?", text_format=City) as stream:
                final = await stream.get_final_response()
            assert final.output_parsed == parsed.output_parsed
        assert "country" in cluster.prefill[0].seen[0].sampling.grammar
        plain = {"model": "smollm2", "input": "Which?", "text": {"format": {"type": "json_object"}}}
        body = (await cluster.http.post("/v1/responses", json=plain)).json()
        assert body["text"] == plain["text"]
        assert "%json" in cluster.prefill[0].seen[-1].sampling.grammar

    run_cluster(test)


@pytest.mark.parametrize(
    ("choice", "follows", "not_follows"),
    [("required", "call_1", "TEXT"), ({"type": "function", "name": "tides"}, "tides", "weather"), ("none", "TEXT", "call_0:")],
)
def test_choices_reach_the_workers(run_cluster: Run, choice: Any, follows: str, not_follows: str) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("anything")
        answer = await cluster.http.post("/v1/responses", json=ASK | {"tool_choice": choice, "parallel_tool_calls": False})
        grammar = cluster.prefill[0].seen[0].sampling.grammar
        assert follows in grammar
        assert not_follows not in grammar
        assert (answer.json()["tool_choice"], answer.json()["parallel_tool_calls"]) == (choice, False)

    run_cluster(test)


CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": [CALL, OUTPUT | {"call_id": "d"}]}, "input.1.call_id", "the id of an earlier call; got 'd'"),
        ({"input": [{"role": "user", "content": "x"}, CALL | {"arguments": "[]"}]}, "input.1.arguments", "a JSON object"),
        ({"input": [CALL, CALL | {"arguments": "1"}], "instructions": "x"}, "input.1.arguments", "`input.1.arguments` must"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input.0.name", "is missing"),
        ({"input": [OUTPUT | {"output": 1}]}, "input.0.output", "got 1"),
        (
            {"input": [{"type": "reasoning", "summary": []}]},
            "input.0.type",
            "one of message, function_call, function_call_output",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "got 'web_search'"),
        ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools.0.name", "letters, digits"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "different names"),
        ({"tools": [TOOLS[0] | {"parameters": {"type": "nonsense"}}]}, "tools.0.parameters", "tools.0.parameters"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice", "none of the tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "function"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type", "got 'allowed_tools'"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}]}, "tools.0.type", "got 'custom'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "got 'xml'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "is missing"),
        ({"text": {"format": SCHEMA | {"schema": {"type": "nonsense"}}}}, "text.format.schema", "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
    ],
)
def test_bad_input_names_the_field(run_cluster: Run, fields: dict[str, Any], param: str, message: str) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.http.post("/v1/responses", json=ASK | fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], message in error["message"]) == (param, True), error
        assert not cluster.prefill[0].seen

    run_cluster(test)


def test_what_the_package_parsed_goes_back_as_its_dump(run_cluster: Run) -> None:
    strict: Any = [tool | {"strict": True, "parameters": PARAMETERS | {"additionalProperties": False}} for tool in TOOLS]

    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        async with client(cluster) as api:
            parsed = await api.responses.parse(**ASK | {"tools": strict})
            dumps: list[Any] = [item.model_dump() for item in parsed.output]
            calls = [item for item in dumps if item["type"] == "function_call"]
            assert calls[0]["parsed_arguments"] == {"city": "Kiel"}
            results: list[Any] = [OUTPUT | {"call_id": call["call_id"]} for call in calls]
            await api.responses.create(**ASK | {"input": [{"role": "user", "content": "?"}, *dumps, *results]})
        assert prompt_text(cluster).count('"arguments": {"city": "Kiel"}') == 2
        await cluster.clean()

    run_cluster(test)


def test_a_cut_call_goes_back_as_it_is(run_cluster: Run) -> None:
    """An answer that reached its limit within a call's arguments, and the result that a client has for it all the same."""
    functions = [{"type": "function", "function": {"name": each["name"], "parameters": PARAMETERS}} for each in TOOLS]

    async def test(cluster: Any) -> None:
        cluster.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel')
        ask: Any = {"model": "smollm2", "messages": [{"role": "user", "content": "?"}], "tools": functions}
        async with client(cluster) as api:
            said: Any = (await api.chat.completions.create(**ask)).choices[0].message
            [call] = said.tool_calls
            assert call.function.arguments == '{"city": "Kiel'
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}
            await api.chat.completions.create(**ask | {"messages": [*ask["messages"], said, result]})
            assert '{"arguments": "{\\"city\\": \\"Kiel"}' in prompt_text(cluster)

            item: Any = (await api.responses.create(**ASK)).output[-1]
            output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "no JSON"}
            await api.responses.create(**ASK | {"input": [{"role": "user", "content": "?"}, item, output]})
            assert '{"arguments": "{\\"city\\": \\"Kiel"}' in prompt_text(cluster)
        await cluster.clean()

    run_cluster(test)
