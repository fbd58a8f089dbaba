"""Answers that follow a grammar, through both workers: the first token, all others, and a stream taken up in the middle."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from protocol.errors import InvalidRequestError
from protocol.messages.decode import Release
from protocol.sampling import SamplingParams
from tests.fault.letters import spoken
from tests.fault.scenarios import Factory, greedy, prompt_of, run

PERSON = """%llguidance {"no_forcing": true}
start: "{" NAME ", " AGE "}"
NAME: /"name": "[ -!#-[^-~]{1,12}"/
AGE: /"age": [1-9]?[0-9]/
"""
PROMPT = prompt_of(50, 4)


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return replace(greedy(80), seed=seed, temperature=1.0, grammar=PERSON, **changes)


@pytest.mark.parametrize("changes", [{}, {"frequency_penalty": 1.5, "repetition_penalty": 1.2}, {"min_tokens": 30}])
def test_every_answer_follows_it(two_workers: Factory, changes: dict[str, float]) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            for seed in range(6):
                answer = await router.generate(PROMPT, sampled(seed, **changes))
                person = json.loads(spoken(answer))
                assert person.keys() == {"name", "age"}
                assert 0 <= person["age"] <= 99
            await workers.until(workers.all_free)

    run(scenario())


def test_a_stream_goes_on_from_any_of_its_tokens(two_workers: Factory) -> None:
    """Prefill and decode build the grammar's state anew from the tokens that were emitted."""

    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            sampling = sampled(3)
            whole = await router.generate(PROMPT, sampling)
            for cut in range(1, len(whole) - 1, 5):
                tokens = PROMPT + whole[:cut]
                ticket = await router.reserve(tokens, len(whole) - cut + 1)
                goal = replace(sampling, max_tokens=len(whole))
                first = await router.compute(ticket, tokens, goal, emitted=cut)
                assert first.token_id == whole[cut]
                if first.finish_reason is None:
                    await router.attach(ticket, first, goal, emitted=cut)
                    assert await router.rest(ticket) == whole[cut + 1 :]
                router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_what_can_not_be_followed_is_refused_by_either(two_workers: Factory) -> None:
    async def scenario() -> None:
        async with two_workers() as workers:
            router = await workers.router()
            bad = replace(greedy(8), grammar="start")
            with pytest.raises(InvalidRequestError, match="grammar"):
                await router.generate(PROMPT, bad)
            ticket = await router.reserve(PROMPT, 8)
            first = await router.compute(ticket, PROMPT, greedy(8))
            with pytest.raises(InvalidRequestError, match="grammar"):
                await router.attach(ticket, first, bad)
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
