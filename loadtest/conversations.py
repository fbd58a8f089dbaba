"""The conversations of a load test, planned before the first one begins: questions, lengths, think times. Pure.

Only the answers are not planned: each question is sent with all that was said before it. Every conversation is drawn from a
generator of its own. So the first ones are the same however many follow, and think times change no question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtest.datasets import Lengths
from loadtest.fillers import Draw
from protocol.errors import InvalidRequestError

Distribution = Literal["fixed", "exponential"]

_SYSTEMS, _QUESTIONS, _THINKING = 2, 3, 4
"""What a generator is for, beside the seed. Numbers 0 and 1 are those of single prompts and of arrivals."""


@dataclass(frozen=True)
class SystemPrompt:
    """A system prompt, which several conversations share."""

    number: int
    text: str
    num_tokens: int
    """Its length as the server tokenizes it, without what the chat template adds, or in words if the server does not tell."""


@dataclass(frozen=True)
class Turn:
    """One question, and the longest answer that it may get."""

    question: str
    question_len: int
    """Length of the question in words."""
    output_len: int
    think_s: float
    """Seconds from the answer before it to this question; 0 for the first one."""


@dataclass(frozen=True)
class Conversation:
    """What one user asks, turn by turn."""

    system: SystemPrompt | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class ConversationShape:
    """What all conversations of a load test have in common. Raises InvalidRequestError, naming the flag."""

    num_turns: int
    first: Lengths
    """Lengths of a first question and its answer."""
    later: Lengths
    """Lengths of every further question and its answer."""
    think_s: float
    """Think time in seconds, on average."""
    distribution: Distribution

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise InvalidRequestError("multi-turn-num-turns must be at least 1", param="multi_turn_num_turns")
        if not (self.think_s >= 0 and math.isfinite(self.think_s)):
            raise InvalidRequestError("multi-turn-delay-ms must be at least 0 and finite", param="multi_turn_delay_ms")

    def think_times(self, rng: np.random.Generator) -> list[float]:
        """Draw the think times before each question, in seconds. The first question waits for none."""
        num = self.num_turns - 1
        drawn = rng.exponential(self.think_s, num) if self.distribution == "exponential" else np.full(num, self.think_s)
        return [0.0, *(float(each) for each in drawn)]


def system_texts(num: int, length: int, draw: Draw, seed: int) -> list[str]:
    """Return the texts of `num` different system prompts of `length` words, or none at all if the length is 0."""
    if length == 0:
        return []
    return [_text(draw, np.random.default_rng((seed, _SYSTEMS, number)), length) for number in range(num)]


def plan_conversations(
    num: int, shape: ConversationShape, systems: Sequence[SystemPrompt], draw: Draw, seed: int
) -> list[Conversation]:
    """Return `num` conversations, which take the system prompts in turn."""
    return [
        Conversation(systems[number % len(systems)] if systems else None, _turns(number, shape, draw, seed))
        for number in range(num)
    ]


def _turns(number: int, shape: ConversationShape, draw: Draw, seed: int) -> tuple[Turn, ...]:
    rng = np.random.default_rng((seed, _QUESTIONS, number))
    lengths = [*shape.first.draw(1, rng), *shape.later.draw(shape.num_turns - 1, rng)]
    thinking = shape.think_times(np.random.default_rng((seed, _THINKING, number)))
    return tuple(
        Turn(_text(draw, rng, question_len), question_len, output_len, think_s)
        for (question_len, output_len), think_s in zip(lengths, thinking, strict=True)
    )


def _text(draw: Draw, rng: np.random.Generator, length: int) -> str:
    return " ".join(map(str, draw(rng, length)))
