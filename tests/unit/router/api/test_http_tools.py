"""Structured answers and tool calls over real HTTP, in front of scripted workers: what workers are asked, what clients get."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "tides")
]
MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Kiel?"}]
CALLS = (
    'I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel \\"{\\""}}\n</tool_call>'
    '\n<tool_call>\n{"name": "tides", "arguments": {"city": "Kiel"}}\n</tool_call>'
)


def test_calls_whole_and_streamed(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        cluster.script.step_s = 0.01
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="smollm2", messages=MESSAGES, tools=TOOLS)
            [choice] = whole.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I look it up."
            assert choice.message.tool_calls is not None
            functions = [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls]  # type: ignore[union-attr]
            assert functions == [("weather", {"city": 'Kiel "{"'}), ("tides", {"city": "Kiel"})]
            ids = [each.id for each in choice.message.tool_calls]
            assert len(set(ids)) == 2

            async with client.chat.completions.stream(model="smollm2", messages=MESSAGES, tools=TOOLS, n=2) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert kinds.count("tool_calls.function.arguments.done") == 4
            assert kinds.count("tool_calls.function.arguments.delta") > 4, "arguments come as they are made"
            for streamed in final.choices:
                assert streamed.finish_reason == "tool_calls"
                assert streamed.message.content == "I look it up."
                assert streamed.message.tool_calls is not None
                told = [(each.function.name, json.loads(each.function.arguments)) for each in streamed.message.tool_calls]
                assert told == functions
        assert "<tool_call>" in cluster.prefill[0].seen[0].sampling.grammar
        await cluster.clean()

    run_cluster(test)


def test_a_streamed_answer_with_calls_goes_back_as_the_package_has_it(run_cluster: Callable[..., None]) -> None:
    """The final message of a stream, its dump, and deltas that are added up, as OpenAI's guide shows."""

    async def test(cluster: Any) -> None:
        cluster.says(CALLS)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            async with client.chat.completions.stream(model="smollm2", messages=MESSAGES, tools=TOOLS) as stream:
                message: Any = (await stream.get_final_completion()).choices[0].message
            added: dict[int, Any] = {}
            pieces = await client.chat.completions.create(model="smollm2", messages=MESSAGES, tools=TOOLS, stream=True)
            async for piece in pieces:
                for call in piece.choices[0].delta.tool_calls or ():
                    if call.index not in added:
                        added[call.index] = call
                    elif call.function is not None:
                        added[call.index].function.arguments += call.function.arguments
            for said in (message, message.model_dump(), {"role": "assistant", "tool_calls": list(added.values())}):
                calls = said["tool_calls"] if isinstance(said, dict) else said.tool_calls
                ids = [call["id"] if isinstance(call, dict) else call.id for call in calls]
                results = [{"role": "tool", "tool_call_id": each, "content": "rain"} for each in ids]
                turn: list[Any] = [*MESSAGES, said, *results]
                answer = await client.chat.completions.create(model="smollm2", messages=turn, tools=TOOLS)
                assert answer.choices[0].finish_reason == "tool_calls"
                prompt = cluster.tokenizer.decode(cluster.prefill[0].seen[-1].token_ids, skip_special=False)
                assert prompt.count("rain") == 2
        await cluster.clean()

    run_cluster(test)


def test_a_conversation_with_calls_and_results_is_in_the_prompt(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("Sunny.")
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Kiel"}'}}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
        ]
        body = {"model": "smollm2", "messages": messages, "tools": TOOLS}
        answer = (await cluster.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Sunny.", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        tokens = cluster.prefill[0].seen[0].token_ids
        prompt = cluster.tokenizer.decode(tokens, skip_special=False)
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>' in prompt
        assert "12 degrees" in prompt
        assert prompt.index('"name": "tides"') < prompt.index("Weather in Kiel?")
        counted = (await cluster.http.post("/tokenize", json=body)).json()
        assert tuple(counted["tokens"]) == tuple(tokens)
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize(
    ("fields", "follows", "not_follows"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "call_1", "TEXT"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tides"}}}, "tides", "weather"),
        ({"tools": TOOLS, "tool_choice": "none"}, "TEXT", "call_0:"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "call_1", ")*\n"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "%json", "TEXT"),
        ({"response_format": {"type": "json_object"}}, 'start: %json {"type": "object"', "TEXT"),
    ],
)
def test_what_a_request_asks_for_is_what_workers_hold_it_to(
    run_cluster: Callable[..., None], fields: dict[str, Any], follows: str, not_follows: str
) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("anything")
        body = {"model": "smollm2", "messages": MESSAGES} | fields
        answer = await cluster.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        prefilled, attached = cluster.prefill[0].seen[0], cluster.decode[0].attached[0]
        assert prefilled.sampling.grammar == attached.sampling.grammar
        assert follows in prefilled.sampling.grammar
        assert not_follows not in prefilled.sampling.grammar
        await cluster.clean()

    run_cluster(test)


def test_plain_completions_follow_schemas_too(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says('{"a": 1}')
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        answer = await cluster.complete(response_format=format_)
        assert answer.json()["choices"][0]["text"] == '{"a": 1}'
        assert '"a": {"type": "integer"}' in cluster.prefill[0].seen[0].sampling.grammar
        await cluster.clean()

    run_cluster(test)
