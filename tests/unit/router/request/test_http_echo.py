"""`echo`: prompts that are said before their answers, and scored, over real HTTP in front of scripted workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from protocol.errors import ProtocolError
from protocol.sampling import PromptLogprobs
from router.request.echo import unpack

PROMPT = "The capital é 日本 is"


def test_a_prompt_is_scored_as_lm_eval_asks_for_it(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        prompt = cluster.tokenizer.encode(PROMPT)
        body = (await cluster.complete(prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0)).json()
        [choice] = body["choices"]
        scored = choice["logprobs"]
        assert choice["text"] == PROMPT + "one"
        num_tokens = len(prompt) + 1
        assert [len(scored[name]) for name in scored] == [num_tokens] * 4
        assert scored["token_logprobs"] == [None, *(-float(i) for i in range(1, len(prompt))), -0.5]
        assert scored["top_logprobs"][0] is None
        assert scored["top_logprobs"][2][scored["tokens"][2]] == -2.0
        assert scored["text_offset"][:2] == [0, len(scored["tokens"][0])]
        assert scored["tokens"][-1] == "one"
        assert body["usage"]["completion_tokens"] == 1
        assert cluster.prefill[0].seen[0].sampling.num_prompt_logprobs == 2

    run_cluster(test)


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_of_an_answer(run_cluster: Callable[..., None], stream: bool) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            request: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 0}
            if stream:
                chunks = [chunk async for chunk in await client.completions.create(stream=True, **request)]
                assert len(chunks) == 1
                [choice] = chunks[0].choices
            else:
                body = await client.completions.create(**request)
                assert body.usage is not None
                assert body.usage.completion_tokens == 0
                [choice] = body.choices
            assert (choice.text, choice.finish_reason) == (PROMPT, "length")
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            assert "".join(choice.logprobs.tokens[:3]) == "The capital é"
        assert not cluster.decode[0].attached
        await cluster.clean()

    run_cluster(test)


def test_echo_of_lists_choices_and_streams(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        request = {"prompt": ["ab", "cd ef"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3, "stop": "three"}
        whole = (await cluster.complete(**request)).json()
        assert [choice["text"] for choice in whole["choices"]] == ["abone two ", "abone two ", "cd efone two ", "cd efone two "]
        first, second = whole["choices"][2:]
        assert first["logprobs"] == second["logprobs"], "what the first choice found out about the prompt"
        asked = [each.sampling.num_prompt_logprobs for each in cluster.prefill[0].seen]
        assert sorted(asked, key=str) == [1, 1, None, None]
        lines = [line for line in (await cluster.complete(stream=True, **request)).text.split("\n") if line]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        for index, choice in enumerate(whole["choices"]):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(each["text"] for each in mine) == choice["text"]
            for name in choice["logprobs"]:
                assert [x for each in mine for x in each["logprobs"][name]] == choice["logprobs"][name]
        await cluster.clean()

    run_cluster(test)


def test_echo_without_logprobs_computes_nothing_more(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        body = (await cluster.complete(prompt=PROMPT, echo=True, max_tokens=2)).json()
        assert body["choices"][0]["text"] == PROMPT + "one two"
        assert body["choices"][0]["logprobs"] is None
        assert cluster.prefill[0].seen[0].sampling.num_prompt_logprobs is None
        long = await cluster.complete(prompt=[1] * 8000, echo=True, logprobs=20, max_tokens=0)
        assert long.status_code == 200, long.text

    run_cluster(test)


def test_a_resumed_answer_says_its_prompt_once(run_cluster: Callable[..., None]) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five")
        cluster.script.step_s = 0.005
        cluster.decode[0].refuse_attach = 1
        cluster.decode[1].refuse_attach = 1
        body = (await cluster.complete(prompt="ab", echo=True, logprobs=0, max_tokens=5)).json()
        [choice] = body["choices"]
        assert choice["text"] == "abone two three four five"
        assert len(choice["logprobs"]["tokens"]) == len(cluster.tokenizer.encode("ab")) + 5

    run_cluster(test, prefill=2, decode=2)


@pytest.mark.parametrize(("chosen", "ids", "top"), [(4, 8, 8), (8, 8, 4), (8, 12, 12), (7, 8, 8), (8, 3, 3)])
def test_logprobs_of_another_prompt_are_refused(chosen: int, ids: int, top: int) -> None:
    with pytest.raises(ProtocolError):
        unpack(PromptLogprobs(bytes(chosen), bytes(ids), bytes(top)), 3)
