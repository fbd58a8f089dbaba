"""Several choices of a prompt, and the prompt's own logprobs, through the whole cluster."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

TEXT = "Prompts of some length are read once, however many answers they get. " * 12


def prefilled(cluster: Any) -> float:
    """Prompt tokens that all workers have computed."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tandem:prefilled_tokens_total{"))


def test_four_choices_share_one_prefill(cluster: Any) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        first = prefilled(cluster)
        alone = client.completions.create(model="smollm2", prompt=TEXT, max_tokens=12, temperature=0.9, seed=7)
        cluster.until(lambda: prefilled(cluster) > first, 5)  # workers report once a second
        before = prefilled(cluster), cluster.worker("worker-1")["prefix_cache_hits"]
        answer = client.completions.create(
            model="smollm2", prompt=TEXT + "Now.", max_tokens=12, temperature=0.9, seed=7, n=4, extra_body={"cache_salt": "n"}
        )
    assert alone.usage is not None
    assert answer.usage is not None
    num_prompt = answer.usage.prompt_tokens
    assert num_prompt == pytest.approx(alone.usage.prompt_tokens, abs=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4, "each choice has a randomness of its own"
    cluster.until(lambda: prefilled(cluster) > before[0] + num_prompt, 5)
    cluster.until(cluster.clean, 10)
    computed = prefilled(cluster) - before[0]
    assert computed < num_prompt + 6 * 16 + 16, "the others compute no more than their last block"
    held = cluster.worker("worker-1")["prefix_cache_hits"] - before[1]
    assert held >= 3 * (num_prompt // 16 * 16), "nor is it sent again"


def test_greedy_choices_are_one(cluster: Any) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="smollm2", prompt=TEXT, max_tokens=12, temperature=0, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 1
