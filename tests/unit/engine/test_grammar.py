"""Constraints: what may be next, by the real model's vocabulary, and what they do to sampling."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.facts import Model
from configs.model_files.vocabulary import token_bytes
from configs.models import resolve
from engine.grammar import MAX_DIGITS, Constraint, Grammars
from engine.sampler import SampleRequest, finish_reason, sample
from protocol.errors import InvalidRequestError
from protocol.sampling import FinishReason, SamplingParams

HEAD = '%llguidance {"no_forcing": true}\n'
YES_OR_NO = HEAD + 'start: "yes" | "no" | "yes, but"'
LIST = HEAD + 'start: %json {"type": "array", "items": {"type": "integer"}, "maxItems": 3}'
EOS = 2


@pytest.fixture(scope="module")
def model() -> Model:
    return resolve("smollm2")


@pytest.fixture(scope="module")
def spelled(model: Model) -> list[bytes]:
    return token_bytes(model.tokenizer)


def params(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(seed=1, max_tokens=100, stop_token_ids=(EOS,)), **changes)


def constrain(model: Model, grammar: str, answer: Sequence[int] = ()) -> Constraint:
    async def build() -> Constraint:
        return await Grammars(model).constraint(grammar, answer)

    return asyncio.run(build())


def allowed(constraint: Constraint, sampling: SamplingParams | None = None, num_generated: int = 0) -> set[int]:
    constraint.begin()
    return set(np.flatnonzero(constraint.allowed(sampling or params(), num_generated)).tolist())


def say(spelled: list[bytes], text: str) -> list[int]:
    """One token a character."""
    return [spelled.index(letter.encode()) for letter in text]


def test_only_what_the_grammar_allows(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, YES_OR_NO)
    assert {spelled[each] for each in allowed(constraint)} == {b"y", b"ye", b"yes", b"n", b"no"}
    for token_id in say(spelled, "ye"):
        constraint.accept(token_id)
    assert {spelled[each] for each in allowed(constraint)} == {b"s"}
    constraint.accept(spelled.index(b"s"))
    assert {spelled[each] for each in allowed(constraint)} == {b"<|im_end|>", b","}
    assert not constraint.complete


def test_complete_where_nothing_can_follow(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, YES_OR_NO, say(spelled, "n"))
    assert finish_reason(params(), spelled.index(b"o"), 2, constraint) is FinishReason.STOP
    assert constraint.complete


def test_all_stop_tokens_where_the_answer_may_end(model: Model, spelled: list[bytes]) -> None:
    answer, comma = say(spelled, "yes"), spelled.index(b",")
    assert allowed(constrain(model, YES_OR_NO, answer), params(stop_token_ids=(EOS, 700, 0)), 3) == {EOS, 700, 0, comma}
    assert allowed(constrain(model, YES_OR_NO, answer), params(stop_token_ids=()), 3) == {comma}, "ignore_eos"


def test_min_tokens_is_kept_as_long_as_the_grammar_allows(model: Model, spelled: list[bytes]) -> None:
    answer, comma = say(spelled, "yes"), spelled.index(b",")
    assert allowed(constrain(model, YES_OR_NO, answer), params(min_tokens=4), 3) == {comma}
    assert allowed(constrain(model, YES_OR_NO, answer), params(min_tokens=3), 3) == {EOS, comma}


def test_states_ahead_are_those_that_come(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, LIST)
    answer = say(spelled, "[12,3]")
    states = constraint.ahead(answer)
    assert len(states) == len(answer) - 1, "nothing can follow the end"
    for token_id, state in zip(answer, states, strict=False):
        assert not state.failed
        constraint.accept(token_id)
        assert allowed(state) == allowed(constraint)


def test_states_end_where_the_grammar_says_no(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, LIST)
    assert len(constraint.ahead(say(spelled, "[1x2]"))) == 2
    assert constraint.ahead(say(spelled, "x")) == []
    assert allowed(constraint) == allowed(constrain(model, LIST)), "it stays where it was"
    digits = say(spelled, "[" + "1" * (MAX_DIGITS + 1))
    states = constraint.ahead(digits)
    assert b"1" in {spelled[each] for each in allowed(states[MAX_DIGITS - 1])}
    assert b"1" not in {spelled[each] for each in allowed(states[MAX_DIGITS])}


def test_a_long_answer_does_not_hold_up_the_loop(model: Model, spelled: list[bytes]) -> None:
    """A token took 77 us with a grammar that stays just below its limits, so 8,000 of them 0.6 s."""
    text = HEAD + 'start: %json {"type": "string"}'
    answer = say(spelled, '"' + "a" * 4096)

    async def turns() -> int:
        grammars, counts = Grammars(model), [0]
        await grammars.constraint(text, ())

        async def count() -> None:
            while True:
                counts[0] += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        constraint = await grammars.constraint(text, answer)
        counting.cancel()
        assert spelled.index(b'"') in allowed(constraint)
        return counts[0]

    assert asyncio.run(turns()) >= 64


def test_another_answer_is_refused(model: Model, spelled: list[bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        constrain(model, YES_OR_NO, say(spelled, "maybe"))


@pytest.mark.parametrize("grammar", ["start", HEAD + "start: nowhere", HEAD + 'start: %json {"type": "foo"}', "x" * 10])
def test_what_is_no_grammar_is_refused(model: Model, grammar: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        constrain(model, grammar)
    assert refused.value.param is None, "it may be of `tools` or of any other field"


def test_a_grammar_that_costs_too_much_ends_in_an_error(model: Model, spelled: list[bytes]) -> None:
    """Ambiguity beyond the limits: the answer ends in an error, also where the model would have ended it."""
    constraint = constrain(model, HEAD + "start: (x | y){1,5000}\nx: /[a-z]/\ny: /[a-z]/ x?")

    def answer(token_id: int) -> None:
        for count in range(100):
            constraint.begin()
            constraint.allowed(params(), count)
            assert finish_reason(params(), token_id, count, constraint) is None

    with pytest.raises(InvalidRequestError, match="grammar failed"):
        answer(spelled.index(b"a"))
    with pytest.raises(InvalidRequestError, match="grammar failed"):
        finish_reason(params(), EOS, 50, constraint)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_walks_follow_the_grammar_and_can_be_taken_up_anywhere(seed: int) -> None:
    model, dice = resolve("smollm2"), random.Random(seed)
    pieces = token_bytes(model.tokenizer)

    async def walk() -> list[int]:
        grammars = Grammars(model)
        constraint, answer = await grammars.constraint(LIST, ()), list[int]()
        while not constraint.complete:
            choices = allowed(constraint)
            if EOS in choices:
                break
            again = await grammars.constraint(LIST, answer)
            assert allowed(again) == choices, "a function of the answer alone"
            closing = [each for each in choices if pieces[each].endswith((b"]", b"]\n"))]
            answer.append(dice.choice(closing if closing and len(answer) > 8 else sorted(choices)))
            constraint.accept(answer[-1])
            if len(answer) > 60:
                return answer
        grammars.close()
        numbers = json.loads(b"".join(pieces[each] for each in answer))
        assert len(numbers) <= 3
        assert all(isinstance(number, int) for number in numbers)
        return answer

    asyncio.run(walk())


def test_a_mask_outweighs_biases_and_penalties(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, YES_OR_NO, say(spelled, "ye"))
    constraint.begin()
    sampling = params(repetition_penalty=2.0, logit_bias=())
    logits = torch.randn(1, model.facts.vocab_size)
    request = SampleRequest(sampling, 9, 2, say(spelled, "yes"), constraint.allowed(sampling, 2))
    assert [token.token_id for token in sample(logits, [request])] == [spelled.index(b"s")]


def test_the_grammars_of_a_closed_worker_compute_nothing(model: Model) -> None:
    grammars = Grammars(model)
    constraint = asyncio.run(grammars.constraint(YES_OR_NO, ()))
    grammars.close()
    with pytest.raises(RuntimeError):
        constraint.begin()
    assert isinstance(grammars._masks, ThreadPoolExecutor)


ENDLESS = HEAD + 'start: %json {"type": ["number", "string"], "pattern": "^[0-9]{60}$"}'


@pytest.mark.parametrize("before", ["", "-0.", "12e"])
def test_a_number_ends_after_as_many_digits_as_anybody_needs(model: Model, spelled: list[bytes], before: str) -> None:
    digits = {spelled.index(str(digit).encode()) for digit in range(10)}
    constraint = constrain(model, ENDLESS, say(spelled, before + "1" * (MAX_DIGITS - 1)))
    assert allowed(constraint) & digits == digits
    constraint.accept(spelled.index(b"1"))
    assert not allowed(constraint) & digits
    assert EOS in allowed(constraint)


def test_digits_go_on_where_nothing_else_may_follow(model: Model, spelled: list[bytes]) -> None:
    constraint = constrain(model, ENDLESS, say(spelled, '"' + "1" * (MAX_DIGITS + 5)))
    assert {spelled[each][:1] for each in allowed(constraint)} == {b"%d" % digit for digit in range(10)}


@pytest.mark.parametrize(
    ("rule", "before"),
    [
        ("TEXT\nTEXT: /(.|\\n)*/", "It is "),
        ('%json {"type": "string"}', '"'),
        ('%json {"type": "object"}', '{"a": "'),
        ('%json {"type": "string", "pattern": "^[0-9]{1,64}$"}', '"'),
        ("/[0-9]{1,80}/", ""),
    ],
)
def test_digits_go_on_outside_of_numbers(model: Model, spelled: list[bytes], rule: str, before: str) -> None:
    digits = {spelled.index(str(digit).encode()) for digit in range(10)}
    constraint = constrain(model, f"{HEAD}start: {rule}\n", say(spelled, before + "1" * (MAX_DIGITS + 20)))
    assert digits <= allowed(constraint)
