"""Answers over real HTTP: shapes, streaming, the `openai` package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import openai

from protocol.sampling import TokenBias
from router.api.server_sent_events import event

TEXT = "Paris is the capital of France. Ünïcödé, 日本語 and 🧑‍🚀 too."
CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def events(body: str) -> list[Any]:
    """The data of all server-sent events; the last one must be [DONE]."""
    lines = [line for line in body.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_whole_chat(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        response = await cluster.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        sent = cluster.prefill[0].seen[0]
        num_answer = len(cluster.tokenizer.encode(TEXT)) + 1
        assert body["usage"] == {
            "prompt_tokens": len(sent.token_ids),
            "completion_tokens": num_answer,
            "total_tokens": len(sent.token_ids) + num_answer,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        text = cluster.tokenizer.decode(sent.token_ids, skip_special=False)
        assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
        assert sent.sampling.max_tokens == 8192 - len(sent.token_ids)
        assert sent.sampling.stop_token_ids == (2,)
        await cluster.clean()

    run_cluster(test)


def test_usage_in_every_chunk(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.001
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body in (("chat/completions", CHAT), ("completions", {"model": "smollm2", "prompt": "a", "max_tokens": 99})):
            response = await cluster.http.post(f"/v1/{path}", json=body | {"stream": True, "stream_options": options})
            *chunks, last = events(response.text)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert len(counts) == len(chunks) >= 10
            assert counts == sorted(counts)
            assert chunks[-1]["usage"] == last["usage"]
            assert last["usage"]["completion_tokens"] == len(cluster.script.answer)
        await cluster.clean()

    run_cluster(test)


def test_streamed_chat(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.001
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await cluster.http.post("/v1/chat/completions", json=CHAT | options)
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response.text)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(cluster.script.answer)
        pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
        assert "".join(pieces) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        await cluster.clean()

    run_cluster(test)


def test_offsets_are_those_of_the_text(run_cluster: Callable[..., None]) -> None:
    """Also behind a character that is split over tokens."""

    async def test(cluster: Any) -> None:
        cluster.says("a 😀 b 🦜 c")
        request = {"model": "smollm2", "prompt": "x", "max_tokens": len(cluster.script.answer) - 1, "logprobs": 1}
        choice = (await cluster.http.post("/v1/completions", json=request)).json()["choices"][0]
        scored = choice["logprobs"]
        assert len(scored["tokens"]) > len(choice["text"].split())
        whole = {token: at for token, at in zip(scored["tokens"], scored["text_offset"], strict=True) if "\ufffd" not in token}
        assert {" b", " c"} <= whole.keys()
        assert all(choice["text"][at:].startswith(token) for token, at in whole.items())
        await cluster.clean()

    run_cluster(test)


def test_completions_streamed_equal_whole(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        request = {"model": "smollm2", "prompt": "The capital", "max_tokens": 9, "logprobs": 2, "return_token_ids": True}
        whole = (await cluster.http.post("/v1/completions", json=request)).json()
        chunks = events((await cluster.http.post("/v1/completions", json=request | {"stream": True})).text)
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == list(cluster.script.answer[:9])
        assert choice["prompt_token_ids"] == cluster.tokenizer.encode("The capital")
        assert whole["usage"]["completion_tokens"] == 9
        streamed = [chunk["choices"][0] for chunk in chunks]
        assert "".join(piece["text"] for piece in streamed) == choice["text"]
        assert joined(piece["token_ids"] for piece in streamed) == choice["token_ids"]
        assert streamed[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in piece for piece in streamed[1:])
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert joined(piece["logprobs"][name] for piece in streamed) == choice["logprobs"][name]
        assert choice["logprobs"]["text_offset"][0] == 0
        assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"]), "equal texts share an entry"
        await cluster.clean()

    run_cluster(test)


def test_chat_logprobs_of_every_token(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("é🧑")
        request = CHAT | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        body = (await cluster.http.post("/v1/chat/completions", json=request)).json()
        choice = body["choices"][0]
        assert body["prompt_token_ids"] == list(cluster.prefill[0].seen[0].token_ids)
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(choice["token_ids"]) == len(cluster.script.answer)
        spoken = b"".join(bytes(entry["bytes"]) for entry in entries[:-1])
        assert spoken.decode() == "é🧑", "parts of a character have their own bytes"
        assert entries[-1]["token"] == "<|im_end|>"
        assert entries[0]["top_logprobs"][0]["logprob"] == -0.5

    run_cluster(test)


def test_cached_tokens_are_in_every_usage(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].cached_tokens = 16
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        for path, request in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "smollm2", "prompt": "x" * 40})):
            whole = (await cluster.http.post(path, json=request)).json()
            chunks = events((await cluster.http.post(path, json=request | streamed)).text)
            assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
            assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        await cluster.clean()

    run_cluster(test)


def test_cache_salt_reaches_prefill(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        await cluster.complete(cache_salt="tenant ü")
        await cluster.complete()
        await cluster.http.post("/v1/chat/completions", json=CHAT | {"cache_salt": "b"})
        assert [message.cache_salt for message in cluster.prefill[0].seen] == ["tenant ü", "", "b"]

    run_cluster(test)


def test_penalties_reach_both_phases(run_cluster: Callable[..., None]) -> None:
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"17": -100, "5": 2}}

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        await cluster.complete(**fields)
        sampling = cluster.prefill[0].seen[0].sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.5)
        assert sampling.logit_bias == (TokenBias(17, -100.0), TokenBias(5, 2.0))
        assert cluster.decode[0].attached[0].sampling == sampling

    run_cluster(test)


def test_an_event_is_one_line_for_whoever_splits_text() -> None:
    said = {"text": "é\x85\u2028\u2029\r\n\x0b\x0c\x1c\x1d\x1e end"}
    data, nothing = event(said).decode().splitlines()
    assert (json.loads(data.removeprefix("data: ")), nothing) == (said, "")
    assert "é" in data


def test_openai_package(run_cluster: Callable[..., None]) -> None:
    def sync_client(url: str) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["smollm2"]
            assert client.models.retrieve("smollm2").id == "smollm2"
            with client.chat.completions.create(model="smollm2", messages=CHAT["messages"], stream=True) as stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        assert await asyncio.to_thread(sync_client, cluster.url) == TEXT
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.create(
                model="smollm2", messages=CHAT["messages"], logprobs=True, top_logprobs=2, seed=3
            )
            assert chat.choices[0].message.content == TEXT
            assert chat.choices[0].logprobs is not None
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None
            assert chat.usage.prompt_tokens_details.cached_tokens == 0
            plain = await client.completions.create(model="smollm2", prompt=[1, 2, 3], logprobs=1, max_tokens=4)
            assert plain.choices[0].logprobs is not None
            stream = await client.completions.create(model="smollm2", prompt="x", max_tokens=4, stream=True)
            assert len([piece async for piece in stream]) >= 1
        await cluster.clean()

    run_cluster(test)


def test_stop_string_across_tokens_ends_the_stream(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six seven")
        request = CHAT | {"stop": ["ee fo", "never"], "return_token_ids": True}
        whole = (await cluster.http.post("/v1/chat/completions", json=request)).json()
        assert whole["choices"][0]["message"]["content"] == "one two thr"
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"]) < len(cluster.script.answer)
        streamed = events((await cluster.http.post("/v1/chat/completions", json=request | {"stream": True})).text)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == "one two thr"
        assert joined(chunk["choices"][0].get("token_ids", []) for chunk in streamed) == whole["choices"][0]["token_ids"]
        await cluster.clean()

    run_cluster(test)


def test_stop_strings_count_after_min_tokens(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("a b a b a b a b")
        request = {"model": "smollm2", "prompt": "x", "stop": " b", "min_tokens": 3, "max_tokens": 8}
        body = (await cluster.http.post("/v1/completions", json=request)).json()
        assert body["choices"][0]["text"] == "a b a"
        assert cluster.prefill[0].seen[0].sampling.min_tokens == 3

    run_cluster(test)


def test_stop_token_is_not_in_the_text(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        [_, two, _] = cluster.tokenizer.encode("one two three")
        request = {"model": "smollm2", "prompt": "x", "stop_token_ids": [two], "max_tokens": 8, "return_token_ids": True}
        choice = (await cluster.http.post("/v1/completions", json=request)).json()["choices"][0]
        assert choice["text"] == "one"
        assert choice["token_ids"][-1] == two
        assert choice["finish_reason"] == "stop"

    run_cluster(test)


def test_answer_of_one_token_never_attaches(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        body = (await cluster.http.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 1})).json()
        assert body["choices"][0]["text"] == "one"
        assert body["choices"][0]["finish_reason"] == "length"
        assert not cluster.decode[0].attached
        await cluster.clean()

    run_cluster(test)


def test_sixteen_at_once_do_not_mix(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.002

        async def one(length: int) -> None:
            request = {"model": "smollm2", "prompt": [length], "max_tokens": length, "return_token_ids": True, "stream": True}
            chunks = events((await cluster.http.post("/v1/completions", json=request)).text)
            token_ids = joined(chunk["choices"][0]["token_ids"] for chunk in chunks)
            assert token_ids == list(cluster.script.answer[:length])

        await asyncio.gather(*(one(length) for length in range(1, 17)))
        await cluster.clean()

    run_cluster(test, prefill=2, decode=2)
