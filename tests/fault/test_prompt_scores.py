"""Logprobs of a prompt's own tokens, from real workers: all of them, whatever is cached, on one rank or two."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from configs.facts import ModelFacts
from protocol.errors import InvalidRequestError
from protocol.messages.decode import Release
from protocol.messages.prefill import FirstToken
from protocol.sampling import PromptLogprobs
from tests.fault.scenarios import Factory, greedy, prompt_of, run
from tests.fault.two_gangs import run_gangs


@pytest.fixture(scope="module")
def expected_scores(small_model: ModelFacts) -> Callable[[list[int]], list[float]]:
    model = LlamaForCausalLM.from_pretrained(small_model.weight_files[0].parent).float().eval()

    def score(prompt: list[int]) -> list[float]:
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)
        return [float(x) for x in logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]]

    return score


async def scored(router: Any, prompt: list[int], num_top: int) -> FirstToken:
    sampling = replace(greedy(1), num_prompt_logprobs=num_top)
    ticket = await router.reserve(prompt, 1)
    try:
        first: FirstToken = await router.compute(ticket, prompt, sampling)
    finally:
        router.decode.send(Release(ticket.ticket_id))
    return first


def chosen(logprobs: PromptLogprobs | None) -> list[float]:
    assert logprobs is not None
    return list(array("f", logprobs.chosen))


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_do_not_depend_on_what_is_cached(
    two_workers: Factory, small_model: ModelFacts, expected_scores: Any, ranks: int
) -> None:
    expected = {length: expected_scores(prompt_of(length)) if length > 1 else [] for length in (1, 2, 31, 33, 100)}

    async def check(workers: Any) -> None:
        router = await workers.router()
        for length, scores in expected.items():
            prompt = prompt_of(length)
            await router.generate(prompt, greedy(4))
            first = await scored(router, prompt, 2)
            assert first.prefilled.cached_tokens == 0
            found = first.prefilled.prompt_logprobs
            assert chosen(found) == pytest.approx(scores, abs=1e-4)
            assert found is not None
            assert len(found.top_ids) == len(found.top_logprobs) == 8 * (length - 1)
            again = await router.reserve(prompt, 4)
            cached = await router.compute(again, prompt, greedy(1))
            assert cached.prefilled.prompt_logprobs is None
            assert cached.prefilled.cached_tokens == (length - 1) // 8 * 8, "what was scored is there for others"
            router.decode.send(Release(again.ticket_id))
        with pytest.raises(InvalidRequestError, match="logprobs"):
            await scored(router, prompt_of(90), 10**9)
        await workers.until(workers.all_free)

    async def scenario() -> None:
        if ranks == 1:
            async with two_workers() as workers:
                await check(workers)
        else:
            async with run_gangs(small_model, ranks, 1) as (workers, _):
                await check(workers)

    run(scenario())
