"""Several choices and several prompts over real HTTP, in front of scripted workers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import openai
import pytest

from protocol.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "Choose."}]


def chunks_of(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("prompt", "in_a_thread"), [(["a"] * 64, True), (["a"], False), ([5] * 64, False)])
def test_many_prompts_are_prepared_beside_the_loop(
    run_cluster: Callable[..., None], prompt: list[Any], in_a_thread: bool
) -> None:
    """A body of 4 KB with 1,000 prompts held up the loop for 20 to 40 ms."""

    async def test(cluster: Any) -> None:
        threads = []

        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return prepare(*args)

        prepare = cluster.router.preparer.completion
        with mock.patch.object(cluster.router.preparer, "completion", noted):
            response = await cluster.complete(prompt=prompt, max_tokens=1)
        assert response.status_code == 200
        assert [thread is not threading.main_thread() for thread in threads] == [in_a_thread]

    run_cluster(test)


def test_choices_of_a_chat(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        cluster.prefill[0].cached_tokens = 16
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="smollm2", messages=MESSAGES, n=3, seed=5)  # type: ignore[arg-type]
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert {choice.message.content for choice in whole.choices} == {"one two three"}
            first, *others = cluster.prefill[0].seen
            assert [each.sampling.choice for each in (first, *others)] == [0, 1, 2], "each has a randomness of its own"
            assert {each.sampling.seed for each in others} == {5}
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == len(first.token_ids), "the prompt counts once"
            assert whole.usage.completion_tokens == 3 * len(cluster.script.answer)
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 16
        await cluster.clean()

    run_cluster(test)


def test_streamed_choices_are_interleaved_and_equal_the_whole(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six")
        cluster.script.step_s = 0.01
        request = {"model": "smollm2", "messages": MESSAGES, "n": 3, "logprobs": True, "return_token_ids": True}
        whole = (await cluster.http.post("/v1/chat/completions", json=request)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = (await cluster.http.post("/v1/chat/completions", json=request | options)).text
        *chunks, last = chunks_of(body)
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order), "nobody waits for the end of another"
        for index, choice in enumerate(whole["choices"]):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
            assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["stop"]
            assert [i for each in mine[1:] for i in each["token_ids"]] == choice["token_ids"]
        assert last["usage"] == whole["usage"]
        await cluster.clean()

    run_cluster(test)


def test_the_first_choice_is_prefilled_before_the_others_which_follow_it(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        cluster.script.step_s = 0.01
        for worker in cluster.prefill:
            worker.gate.clear()
        asking = asyncio.create_task(cluster.complete(n=4))
        await cluster.until(lambda: any(worker.seen for worker in cluster.prefill))
        await asyncio.sleep(0.05)
        assert sum(len(worker.seen) for worker in cluster.prefill) == 1
        for worker in cluster.prefill:
            worker.gate.set()
        assert (await asking).status_code == 200
        assert sorted(len(worker.seen) for worker in cluster.prefill) == [0, 0, 4], "one worker has the prompt"
        assert sorted(len(worker.attached) for worker in cluster.decode) == [0, 4]
        await cluster.clean()

    run_cluster(test, prefill=3, decode=2)


def test_other_workers_serve_when_those_with_the_prompt_are_lost(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six")
        cluster.script.step_s = 0.02
        asking = asyncio.create_task(cluster.complete(n=3, max_tokens=6))
        await cluster.until(lambda: any(len(worker.attached) == 3 for worker in cluster.decode))
        [busy] = [worker for worker in cluster.decode if worker.attached]
        await busy.die()
        body = (await asking).json()
        assert [choice["text"] for choice in body["choices"]] == ["one two three four five six"] * 3
        await cluster.clean()

    run_cluster(test, prefill=1, decode=2)


def test_lists_of_prompts(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        for prompts, token_ids in (
            (["ab", "cd ef"], [cluster.tokenizer.encode("ab"), cluster.tokenizer.encode("cd ef")]),
            ([[5, 6], [7]], [[5, 6], [7]]),
        ):
            body = (await cluster.complete(prompt=prompts, n=2, max_tokens=2, return_token_ids=True)).json()
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            asked = [choice["prompt_token_ids"] for choice in body["choices"]]
            assert asked == [token_ids[0], token_ids[0], token_ids[1], token_ids[1]]
            assert body["usage"]["prompt_tokens"] == sum(map(len, token_ids))
            assert body["usage"]["completion_tokens"] == 8
            chunks = chunks_of((await cluster.complete(prompt=prompts, n=2, max_tokens=2, stream=True)).text)
            assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}
        seen = cluster.prefill[0].seen[:4]
        assert sorted((each.token_ids, each.sampling.choice) for each in seen) == sorted(
            (tuple(ids), choice)
            for ids in (cluster.tokenizer.encode("ab"), cluster.tokenizer.encode("cd ef"))
            for choice in (0, 1)
        )
        await cluster.clean()

    run_cluster(test)


def test_many_prompts_take_turns(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        for worker in cluster.prefill:
            worker.gate.clear()
        asking = asyncio.create_task(cluster.complete(prompt=[[number] for number in range(100)], max_tokens=2))
        await cluster.until(lambda: len(cluster.prefill[0].working) == 32)
        await asyncio.sleep(0.05)
        assert len(cluster.prefill[0].working) == 32, "one request does not take everything"
        cluster.prefill[0].gate.set()
        body = (await asking).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(100))
        assert {each.token_ids[0] for each in cluster.prefill[0].seen} == set(range(100))
        await cluster.clean()

    run_cluster(test)


def test_leaving_frees_every_choice(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        cluster.script.step_s = 0.005
        stream, _ = await cluster.start_stream(n=5, max_tokens=5000, ignore_eos=True)
        await cluster.until(lambda: len(cluster.decode[0].attached) == 5)
        await stream.__aexit__(None, None, None)
        await cluster.clean()
        cluster.prefill[0].gate.clear()
        asking = asyncio.create_task(cluster.complete(n=5))
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        asking.cancel()
        await cluster.clean()
        assert len(cluster.prefill[0].seen) == 6, "those that waited for the prompt never began"

    run_cluster(test)


def test_an_error_of_one_choice_ends_all(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].fail_with = InvalidRequestError("no", param="prompt")
        refused = await cluster.complete(n=3)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        cluster.prefill[0].fail_with = None
        cluster.says("one two three")
        cluster.script.step_s = 0.005
        stream, lines = await cluster.start_stream(n=3, max_tokens=5000, ignore_eos=True)
        await cluster.until(lambda: len(cluster.decode[0].attached) == 3)
        cluster.prefill[0].fail_with = InvalidRequestError("no", param="prompt")
        cluster.decode[0].error_after = 0
        said = [line async for line in lines if line]
        assert json.loads(said[-1].removeprefix("data: "))["error"]["message"] == "no"
        await stream.__aexit__(None, None, None)
        await cluster.clean()

    run_cluster(test)
