"""The whole cluster over HTTP: in float32 as `transformers` says it, and the same whatever is beside it or cached."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

pytestmark = pytest.mark.slow

LENGTHS = [5, 6, 8, 11, 15, 16, 17, 24, 32, 47, 64, 100, 128, 200, 257, 384, 511, 700, 1024, 1500]
NUM_TOKENS = 12
TEXTS = [
    "The capital of France is Paris, and the river that runs through it is called the Seine. ",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n",
    "Zwei Hexen wuschen zwölf Wäschestücke; 3,141 of them were 100 % clean!\n",
    "Q: What is 17 + 25?\nA: 42\n\nQ: Who wrote Hamlet?\nA: ",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}\n',
]


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int


@pytest.fixture(scope="module")
def prompts(shared_cluster: Any) -> list[list[int]]:
    """One prompt of each length, cut from varied text."""
    found = []
    for number, length in enumerate(LENGTHS):
        rng = random.Random(number)
        text = "".join(rng.choice(TEXTS) for _ in range(length // 10 + 4))
        answer = httpx.post(f"{shared_cluster.url}/tokenize", json={"model": "smollm2", "prompt": text}, timeout=60)
        found.append(answer.json()["tokens"][:length])
    assert [len(prompt) for prompt in found] == LENGTHS
    return found


@pytest.fixture(scope="module")
def float32_cluster(serve: Callable[..., Any]) -> Any:
    """What `transformers` computes in is float32."""
    served = serve("--dtype", "float32")
    served.wait_ready()
    return served


def complete(base_url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True, **fields}
    answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=150)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {**body["choices"][0], "cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]}


def greedy(base_url: str, prompt: list[int], cache_salt: str) -> Answer:
    choice = complete(base_url, prompt, temperature=0, logprobs=1, ignore_eos=True, cache_salt=cache_salt)
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["cached_tokens"])


def test_greedy_equals_transformers_alone_sixteen_at_once_and_cached(
    float32_cluster: Any, prompts: list[list[int]], transformers_smollm2: Any
) -> None:
    cluster = float32_cluster
    twice = [[greedy(cluster.url, prompt, "alone") for _ in range(2)] for prompt in prompts]
    alone, cached = zip(*twice, strict=True)
    for prompt, answer in zip(prompts, alone, strict=True):
        assert_equals_reference(transformers_smollm2, prompt, answer)
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda prompt: greedy(cluster.url, prompt, "together"), prompts))
    for others in (together, cached):
        assert [answer.token_ids for answer in others] == [answer.token_ids for answer in alone]
        for one, other in zip(alone, others, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)
    assert [answer.cached_tokens for answer in cached] == [(length - 1) // 16 * 16 for length in LENGTHS]


def assert_equals_reference(reference: Any, prompt: list[int], answer: Answer) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer.token_ids]), logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1)
    assert answer.token_ids == expected.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"
    chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)


def test_seeded_sampling_is_the_same_alone_and_among_fifteen_others(cluster: Any, prompts: list[list[int]]) -> None:
    def sampled(number: int, cache_salt: str) -> str:
        fields = {"seed": 1000 + number, "temperature": 0.9, "top_p": 0.95, "max_tokens": 24, "cache_salt": cache_salt}
        text: str = complete(cluster.url, prompts[number], **fields)["text"]
        return text

    watched = [3, 9, 14]
    alone = {number: sampled(number, "seeded, alone") for number in watched}
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda number: sampled(number, "seeded, together"), range(16)))
    assert {number: together[number] for number in watched} == alone
    assert len(set(together)) == 16, "different seeds and prompts say different things"


def test_echo_scores_prompts_as_transformers_does(float32_cluster: Any, transformers_smollm2: Any) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(17, 40_000) for _ in range(length)] for length in (1, 2, 40, 700)]
    body = {"model": "smollm2", "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    for _ in range(2):  # the second time all of it is cached
        answer = httpx.post(f"{float32_cluster.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        for prompt, choice in zip(prompts, answer.json()["choices"], strict=True):
            first, *scores = choice["logprobs"]["token_logprobs"]
            with torch.inference_mode():
                expected = torch.log_softmax(transformers_smollm2(torch.tensor([prompt])).logits[0, :-1], dim=-1)
            assert first is None
            assert scores == pytest.approx(expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), abs=2e-3)
            likeliest = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
            assert likeliest == pytest.approx(expected.max(dim=-1).values.tolist(), abs=2e-3)
