"""Plans of conversations: the same from the same seed, of the lengths that were asked for, whatever else changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.conversations import ConversationShape, Distribution, SystemPrompt, plan_conversations, system_texts
from loadtest.datasets import Lengths, passages
from loadtest.fillers import word_filler
from protocol.errors import InvalidRequestError

DRAW = word_filler().draw


@st.composite
def shapes(draw: st.DrawFn) -> ConversationShape:
    lengths = [Lengths(draw(st.integers(1, 30)), draw(st.integers(1, 30)), draw(st.floats(0, 0.99)), 0) for _ in range(2)]
    return ConversationShape(
        num_turns=draw(st.integers(1, 6)),
        first=lengths[0],
        later=lengths[1],
        think_s=draw(st.floats(0, 10)),
        distribution=draw(st.sampled_from(["fixed", "exponential"])),
    )


systems = st.integers(0, 3).map(lambda num: [SystemPrompt(number, f"You are {number}", 3) for number in range(num)])
seeds = st.integers(0, 2**31)


@given(shapes(), systems, seeds, st.integers(0, 5), st.integers(0, 5))
def test_further_conversations_change_no_earlier_ones(
    shape: ConversationShape, prompts: list[SystemPrompt], seed: int, num: int, more: int
) -> None:
    planned = plan_conversations(num + more, shape, prompts, DRAW, seed)
    assert len(planned) == num + more
    assert planned[:num] == plan_conversations(num, shape, prompts, DRAW, seed)
    assert [each.system for each in planned] == [prompts[i % len(prompts)] if prompts else None for i in range(num + more)]


@given(shapes(), seeds)
def test_lengths_are_those_that_were_asked_for(shape: ConversationShape, seed: int) -> None:
    for conversation in plan_conversations(3, shape, [], DRAW, seed):
        assert len(conversation.turns) == shape.num_turns
        for index, turn in enumerate(conversation.turns):
            lengths = shape.later if index else shape.first
            assert turn.question_len == len(turn.question.split())
            for got, wanted in ((turn.question_len, lengths.input_len), (turn.output_len, lengths.output_len)):
                least, most = wanted * (1 - lengths.range_ratio), wanted * (1 + lengths.range_ratio)
                assert max(1, np.floor(least)) <= got <= np.ceil(most)


@given(shapes(), seeds, st.floats(0, 100), st.sampled_from(["fixed", "exponential"]))
def test_think_times_change_no_question(
    shape: ConversationShape, seed: int, think_s: float, distribution: Distribution
) -> None:
    other = dataclasses.replace(shape, think_s=think_s, distribution=distribution)
    plans = [plan_conversations(3, each, [], DRAW, seed) for each in (shape, other)]
    asked = [[(turn.question, turn.output_len) for each in plan for turn in each.turns] for plan in plans]
    assert asked[0] == asked[1]
    for conversation in plans[1]:
        assert conversation.turns[0].think_s == 0
        thinking = [turn.think_s for turn in conversation.turns[1:]]
        assert all(each == think_s if distribution == "fixed" else each >= 0 for each in thinking)


def test_exponential_think_times_have_their_mean() -> None:
    lengths = Lengths(1, 1, 0.0, 0)
    shape = ConversationShape(num_turns=101, first=lengths, later=lengths, think_s=2.0, distribution="exponential")
    thinking = [turn.think_s for each in plan_conversations(100, shape, [], DRAW, 0) for turn in each.turns[1:]]
    assert np.mean(thinking) == pytest.approx(2.0, rel=0.05)
    assert np.std(thinking) == pytest.approx(2.0, rel=0.05)


@given(st.integers(1, 4), st.integers(0, 50), seeds)
def test_system_prompts(num: int, length: int, seed: int) -> None:
    texts = system_texts(num, length, DRAW, seed)
    assert [len(text.split()) for text in texts] == ([length] * num if length else [])
    assert texts == system_texts(num + 1, length, DRAW, seed)[: len(texts)]
    if length >= 20:
        assert len(set(texts)) == num


def test_seeds_differ() -> None:
    lengths = Lengths(8, 8, 0.0, 0)
    shape = ConversationShape(num_turns=2, first=lengths, later=lengths, think_s=1.0, distribution="exponential")
    plans = [plan_conversations(2, shape, [], DRAW, seed) for seed in (0, 1)]
    assert plans[0][0].turns[0].question != plans[1][0].turns[0].question
    questions = {turn.question for plan in plans for each in plan for turn in each.turns}
    assert len(questions) == 8, "no question comes twice"


@given(st.integers(1, 9), st.integers(0, 30), seeds)
def test_passages_are_pieces_of_the_text(num_words: int, length: int, seed: int) -> None:
    words = list(range(num_words))
    drawn = passages(words)(np.random.default_rng(seed), length)
    assert len(drawn) == length
    assert all(after == (before + 1) % num_words for before, after in zip(map(int, drawn), map(int, drawn[1:]), strict=False))


def test_what_can_not_be_planned() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        passages([])
    lengths = Lengths(1, 1, 0.0, 0)
    for turns, think_s, param in (
        (0, 0.0, "multi_turn_num_turns"),
        (1, -1.0, "multi_turn_delay_ms"),
        (1, np.inf, "multi_turn_delay_ms"),
        (1, np.nan, "multi_turn_delay_ms"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            ConversationShape(num_turns=turns, first=lengths, later=lengths, think_s=think_s, distribution="fixed")
        assert error.value.param == param
