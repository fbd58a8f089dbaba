"""Requests through the whole cluster with the `openai` package, and what is left when they are over."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]


def client(cluster: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_openai_package_streams_a_sensible_answer(cluster: Any) -> None:
    stream = client(cluster).chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len([chunk for chunk in chunks if chunk.choices]) > 3, "it came in pieces"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_whole_answers_and_models(cluster: Any) -> None:
    api = client(cluster)
    assert [model.id for model in api.models.list()] == ["smollm2"]
    answer = api.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 8)


def test_32_streams_of_mixed_lengths_finish_and_leave_nothing(cluster: Any) -> None:
    async def one(api: openai.AsyncOpenAI, number: int) -> int:
        prompt = "Tell me about the number " + "and about the next number " * (number * 3)
        stream = await api.completions.create(
            model="smollm2", prompt=prompt, max_tokens=4 + number, seed=number, stream=True, extra_body={"ignore_eos": True}
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        assert reasons[-1] == "length"
        return len(reasons)

    async def all_at_once() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as api:
            return await asyncio.gather(*(one(api, number) for number in range(32)))

    assert len(asyncio.run(all_at_once())) == 32
    cluster.until(cluster.clean, 10)


def test_a_client_that_goes_away_frees_its_work(cluster: Any) -> None:
    stream = client(cluster).completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert not cluster.clean()
    stream.close()
    cluster.until(cluster.clean, 10)
