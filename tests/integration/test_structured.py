"""Answers of a given form through the whole cluster, with the `openai` package: JSON of a schema, and calls of tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from benchmarks.lib.schemas import SCHEMAS
from tests.cases import slow

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(BaseModel):
    """Weather of a city"""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    hobbies: list[Literal["golf", "chess", "music"]] = Field(max_length=3)


def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.slow
def test_every_schema_is_followed(cluster: Any) -> None:
    """One seed of the twenty schemas, all at once; `benchmarks.structured` takes ten."""

    async def one(api: openai.AsyncOpenAI, name: str) -> None:
        wanted, schema = SCHEMAS[name]
        answer = await api.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"Describe {wanted} as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": name, "schema": schema}},
            temperature=1,
            seed=7,
            max_tokens=600,
        )
        assert answer.choices[0].finish_reason == "stop", name
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)

    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as api:
            await asyncio.gather(*(one(api, name) for name in SCHEMAS))

    asyncio.run(all_at_once())
    cluster.until(cluster.clean, 10)


def test_pydantic_models_are_parsed(cluster: Any) -> None:
    answer = client(cluster).chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        seed=2,
        max_tokens=300,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.slow
def test_streamed_json_of_several_choices(cluster: Any) -> None:
    with client(cluster).chat.completions.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "Invent a person."}],
        response_format=Person,
        n=3,
        seed=2,
        max_tokens=300,
    ) as stream:
        pieces = sum(event.type == "content.delta" for event in stream)
        final = stream.get_final_completion()
    assert pieces > 20
    people = [choice.message.parsed for choice in final.choices]
    assert all(isinstance(person, Person) for person in people)
    assert len({str(person) for person in people}) == 3, "each choice has a randomness of its own"


NAMED = {"type": "function", "function": {"name": "Weather"}}


@pytest.mark.parametrize("choice", ["required", *slow([NAMED])])
def test_tools_that_must_be_called(cluster: Any, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Person)]
    api = client(cluster)
    answer = api.chat.completions.parse(
        model="smollm2", messages=ASK, tools=tools, tool_choice=choice, temperature=0, parallel_tool_calls=False, max_tokens=200
    )
    [choice_] = answer.choices
    assert choice_.finish_reason == "tool_calls"
    assert choice_.message.content is None
    assert choice_.message.tool_calls is not None
    [call] = choice_.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather | Person)
    assert call.function.name == "Weather" or choice == "required"

    conversation = [
        *ASK,
        choice_.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "It is 20 degrees and sunny."},
    ]
    told = api.chat.completions.create(
        model="smollm2", messages=conversation, tools=tools, tool_choice="none", temperature=0, max_tokens=40
    )
    assert told.choices[0].message.content
    assert told.choices[0].message.tool_calls is None
    cluster.until(cluster.clean, 10)


def test_tools_that_may_be_called_leave_text_alone(cluster: Any) -> None:
    question: Any = [{"role": "user", "content": "Name the capital of France."}]
    tools = [openai.pydantic_function_tool(Weather)]
    answer = client(cluster).chat.completions.create(
        model="smollm2", messages=question, tools=tools, temperature=0, max_tokens=60
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
